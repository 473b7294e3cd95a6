"""`loopscope convert`: to and from Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_text, say
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_OK, ConfigError
from loopscope.options import ConvertOptions, Target
from loopscope.words import check_word


@dataclass(frozen=True, kw_only=True)
class Convert(
    ConvertOptions,
    Verb,
    command="convert",
    example=("convert runs/NAME out/", "for Hugging Face's libraries, and back"),
):
    """Flags of `loopscope convert`."""

    target: Target
    out: Positional[str]
    """Folder to write; it is there when it is whole, and not before."""
    from_pickle: bool = False
    """TARGET is a pickled checkpoint (.pt, .pth, .bin), to be made a folder of safetensors. It is read by torch's
    restricted reader in a process of its own, with limits on memory and time; no other command ever opens one."""
    setting: tuple[str, ...] = ()
    """What a pickled checkpoint of the paper does not say: num_heads=8 num_loops=4, readout=final-only,
    inter_loop_norm=true."""
    json: bool = False
    """Print what was written as JSON."""

    help: ClassVar[str] = """Write a model for Hugging Face's libraries, or bring it back as a run folder.

The folder has config.json, safetensors, the tokenizer with its special tokens and chat template, results that are about
these weights, and a model card. Nothing goes over the network unless --push asks for it.

examples:
  loopscope convert runs/nano-per-loop-rmsnorm-s42 out/
  loopscope convert downloads/Ouro-1.4B out/ --dtype bfloat16
  loopscope convert out/ runs/back --to loopscope
  loopscope convert runs/nano out/ --push my-org/nano
  loopscope convert parcae-140m/pytorch_model.bin out/ --from-pickle
  loopscope convert paper.pt out/ --from-pickle --setting num_heads=8 num_loops=4"""

    def run(self) -> int:
        """Convert and print."""
        if self.from_pickle:
            return self._from_pickle()
        if self.setting:
            raise ConfigError.of("setting", self.setting[0], "is for a pickled checkpoint; add --from-pickle")
        check_word(self.target)
        from loopscope.api.conversion import convert

        converted = convert(self.target, self.out, self, say=say)
        if self.json:
            print_json(**converted.to_json())
            return EXIT_OK
        print_text(f"{converted.target} → {converted.out}: {converted.parameters:,} parameters")
        print_text("\n".join(f"  {name}" for name in converted.files))
        if converted.pushed is not None:
            print_text(f"pushed to {converted.pushed}")
        return EXIT_OK

    def _from_pickle(self) -> int:
        """Make safetensors of a pickle; what it becomes follows from what is in it."""
        for each in fields(ConvertOptions):
            if (value := getattr(self, each.name)) != each.default:
                raise ConfigError.of(each.name, value, "does not go with --from-pickle; convert its folder then")
        settings = dict(self._setting(text) for text in self.setting)
        from loopscope.adapters.pickled import convert_pickle

        out = Path(self.out).expanduser()
        notes = convert_pickle(Path(self.target), out, settings)
        files = sorted(path.name for path in out.iterdir())
        if self.json:
            print_json(target=self.target, out=str(out.absolute()), files=files, notes=notes)
            return EXIT_OK
        print_text(f"{self.target} → {out}")
        print_text("\n".join(f"  {name}" for name in files))
        print_text("\n".join(f"note: {note}" for note in notes))
        return EXIT_OK

    def _setting(self, text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError.of("setting", text, "is not of the form NAME=VALUE")
        return name, value
