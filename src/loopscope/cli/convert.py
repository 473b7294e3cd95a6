"""`loopscope convert`: to and from Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_text, say
from loopscope.errors import EXIT_OK
from loopscope.words import check_word


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Flags of `loopscope convert`."""

    target: Positional[str]
    """Run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, design:NAME, configuration
    file, or package.module:factory."""
    out: Positional[str]
    """Folder to write; it is there when it is whole, and not before."""
    to: Literal["hf", "loopscope"] = "hf"
    """hf: for AutoModelForCausalLM, after `import loopscope.hf`; loopscope: a run folder, without optimiser state."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; as they are by default."""
    overwrite: bool = False
    """Replace a folder that an earlier conversion wrote."""
    push: str | None = None
    """ORG/NAME on Hugging Face's hub to upload the folder to, through huggingface_hub and the token it finds."""
    public: bool = False
    """A repository that --push makes is private without this."""
    json: bool = False
    """Print what was written as JSON."""

    help: ClassVar[str] = """Write a model for Hugging Face's libraries, or bring it back as a run folder.

The folder has config.json, safetensors, the tokenizer with its special tokens and chat template, results that are about
these weights, and a model card. Nothing goes over the network unless --push asks for it.

examples:
  loopscope convert runs/nano-per-loop-rmsnorm-s42 out/
  loopscope convert downloads/Ouro-1.4B out/ --dtype bfloat16
  loopscope convert out/ runs/back --to loopscope
  loopscope convert runs/nano out/ --push my-org/nano"""

    def run(self) -> int:
        """Convert and print."""
        check_word(self.target)
        from loopscope.verbs.conversion import convert

        converted = convert(
            self.target,
            self.out,
            to=self.to,
            dtype=self.dtype,
            overwrite=self.overwrite,
            push=self.push,
            public=self.public,
            say=say,
        )
        if self.json:
            print_json(**converted.to_json())
            return EXIT_OK
        print_text(f"{converted.target} → {converted.out}: {converted.parameters:,} parameters")
        print_text("\n".join(f"  {name}" for name in converted.files))
        if converted.pushed is not None:
            print_text(f"pushed to {converted.pushed}")
        return EXIT_OK
