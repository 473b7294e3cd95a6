"""`loopscope generate`: text from any target, streamed to the terminal."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.cli.terminal import print_json, say
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_OK, ConfigError
from loopscope.files import read_text
from loopscope.options import GenerateOptions, Target
from loopscope.words import check_policy, check_tokenizer, check_word

if TYPE_CHECKING:
    from loopscope.api.generation import Generation

DEPTH_COLOURS = (33, 37, 70, 142, 172, 160)
"""Of a terminal with 256 colours, from blue to red."""
MOST_PROMPT_BYTES = 64 << 20
"""Largest file of prompts that is read."""


@dataclass(frozen=True, kw_only=True)
class Generate(
    GenerateOptions,
    Verb,
    command="generate",
    example=('generate runs/NAME "The "', "text, at any number of loops"),
    start_here="prompts_file max_tokens temperature top_p stop num_loops speculate json",
):
    """Flags of `loopscope generate`."""

    target: Target
    prompt: Positional[tuple[str, ...]] = ()
    """What the text begins with; several make a batch."""
    prompts_file: str | None = None
    """A file with a prompt in every line, or - for standard input."""
    show_loops: bool = False
    """Colour tokens by the loop they left at, on a terminal, and say how many left where."""
    json: bool = False
    """Print tokens, log-probabilities and loops as JSON instead of streaming text."""

    help: ClassVar[
        str
    ] = """Text from a looped model, greedy or sampled, at any number of loops, through an exact cache.

Text streams to the terminal as soon as it is certain. A model without a cache works too, slowly, and says so.

examples:
  loopscope generate runs/nano-per-loop-rmsnorm-s42 "The river"
  loopscope generate runs/nano "The river" --temperature 0.8 --top-p 0.95 --seed 3
  loopscope generate downloads/Ouro-1.4B "The river" --num-loops 8 --stop "."
  loopscope generate runs/nano "The river" --speculate auto
  loopscope generate runs/nano --prompts-file prompts.txt --json
  echo "The river" | loopscope generate runs/nano --prompts-file -"""

    def run(self) -> int:
        """Generate and print."""
        check_word(self.target)
        check_tokenizer(self.tokenizer)
        if self.halting is not None:
            check_policy(self.halting, "halting")
        prompts = self._prompts()
        from loopscope.api.generation import Generation

        generation = Generation(self.target, prompts, self, say=say)
        if self.json:
            for _ in generation:
                pass
            made = [each.to_json(generation.tokenizer) for each in generation.results]
            print_json(
                target=generation.opened.name,
                num_loops=generation.num_loops,
                trained_loops=generation.opened.model.num_loops,
                speculation=None if generation.tally is None else asdict(generation.tally),
                results=made,
            )
        elif len(prompts) == 1:
            _stream(generation, coloured=self.show_loops and sys.stdout.isatty())
        else:
            for _ in generation:  # each when it is complete: streams would run into one another
                pass
            for result in generation.results:
                sys.stdout.write(f"{result.prompt}{result.text}\n\n")
        if self.show_loops:
            left = Counter(token.loops for result in generation.results for token in result.tokens)
            mean = sum(k * count for k, count in left.items()) / left.total()
            places = ", ".join(f"{count} at loop {k}" for k, count in sorted(left.items()))
            say(f"tokens left: {places}; {mean:.2f} of {generation.num_loops} loops a token")
        return EXIT_OK

    def _prompts(self) -> list[str]:
        if (self.prompts_file is None) == (not self.prompt):
            raise ConfigError("give prompts as arguments, or a file of them with --prompts-file (- is standard input)")
        if self.prompts_file is None:
            return list(self.prompt)
        if self.prompts_file == "-":
            text = sys.stdin.read(MOST_PROMPT_BYTES + 1)
            if len(text) > MOST_PROMPT_BYTES:
                raise ConfigError.of("prompts_file", "-", f"more than {MOST_PROMPT_BYTES:,} characters of prompts")
        else:
            try:
                text = read_text(Path(self.prompts_file), MOST_PROMPT_BYTES)
            except OSError as error:
                raise ConfigError.of("prompts_file", self.prompts_file, str(error.strerror or error)) from None
            except UnicodeDecodeError:
                raise ConfigError.of("prompts_file", self.prompts_file, "is not UTF-8 text") from None
        lines = [line for line in text.splitlines() if line]
        if not lines:
            raise ConfigError.of("prompts_file", self.prompts_file, "has no prompts; it should have one in every line")
        return lines


def _stream(generation: Generation, *, coloured: bool) -> None:
    """The prompt, and what follows it piece by piece; from blue to red by the loop that each token left at."""
    sys.stdout.write(generation.prompts[0])
    for piece in generation:
        depth = (piece.loops - 1) * len(DEPTH_COLOURS) // generation.num_loops
        colour = DEPTH_COLOURS[min(depth, len(DEPTH_COLOURS) - 1)]
        sys.stdout.write(f"\x1b[38;5;{colour}m{piece.text}\x1b[0m" if coloured else piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
