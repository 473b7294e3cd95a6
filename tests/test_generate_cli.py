"""`loopscope generate` and `ls.generate` as a user runs them: prompts, text, JSON, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

import loopscope as ls
from loopscope.cli import main
from loopscope.data.tokenizers import bytes_tokenizer

DESIGN = """
model: {vocab_size: 256, width: 32, num_layers: 1, num_heads: 2, num_loops: 3, max_length: 48, tie_head: false}
"""
DOCS = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")


@pytest.fixture
def target(tmp_path) -> str:
    path = tmp_path / "design.yaml"
    path.write_text(DESIGN)
    return str(path)


@pytest.fixture
def generate(target, capsys):
    """Run `loopscope generate` on the small design with bytes; gives exit code, stdout, stderr."""

    def run(*flags: str, tokenizer: str | None = "bytes", of: str = target) -> tuple[int, str, str]:
        named = [] if tokenizer is None else ["--tokenizer", tokenizer]
        code = main(["generate", of, *named, "--max-tokens", "6", "--device", "cpu", *flags])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def results(out: str) -> list[dict]:
    return json.loads(out)["results"]


def test_the_text_follows_its_prompt(generate, target):
    code, out, err = generate("The river")
    assert (code, err) == (0, "")
    assert out == f"The river{ls.generate(target, 'The river', tokenizer='bytes', max_tokens=6)}\n"
    assert len(out) > len("The river\n")


def test_a_model_that_is_not_finite_is_a_finding_and_no_mistake(generate, tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text(
        "import loopscope as ls\n"
        "def build():\n"
        "    model = ls.build(ls.preset('demo').model, seed=0)\n"
        "    model.embedding.weight.data.fill_(float('nan'))\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = generate("The river", of="broken_model:build")
    assert (code, out) == (1, "The river"), "what was asked is shown, and nothing after it"
    assert "are not finite numbers: no token can be chosen from them" in err


def test_several_prompts_are_a_batch_and_give_what_each_gives_alone(generate):
    prompts = ["The river", "A", "Of all"]
    together = results(generate(*prompts, "--json")[1])
    alone = [results(generate(prompt, "--json")[1])[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert [token["id"] for token in one["tokens"]] == [token["id"] for token in other["tokens"]]
        assert [each["logprob"] for each in one["tokens"]] == pytest.approx(
            [each["logprob"] for each in other["tokens"]], abs=1e-4
        )
    _, out, _ = generate(*prompts)
    assert out == "".join(f"{each['prompt']}{each['text']}\n\n" for each in together)


def test_prompts_come_from_a_file_or_from_standard_input(generate, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("The river\n\nÜber\n")
    from_file = results(generate("--prompts-file", str(tmp_path / "prompts.txt"), "--json")[1])
    assert [each["prompt"] for each in from_file] == ["The river", "Über"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("The river\nÜber\n"))
    assert results(generate("--prompts-file", "-", "--json")[1]) == from_file


def test_json_says_what_was_made_and_every_field_is_documented(generate):
    _, out, _ = generate("The river", "Of", "--num-loops", "5", "--json")
    document = json.loads(out)
    assert (document["num_loops"], document["trained_loops"]) == (5, 3)
    first = document["results"][0]
    assert first["finish"] == "length" and first["loops"] == 5 * 6
    assert all(token["loops"] == 5 and token["logprob"] < 0 for token in first["tokens"])
    assert bytes_tokenizer().decode([token["id"] for token in first["tokens"]]) == first["text"]

    def keys(value):
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    section = DOCS.split("`loopscope generate --json`")[1].split("\n## ")[0]
    assert [key for key in keys(document) if f"`{key}`" not in section] == []


def test_the_number_of_loops_changes_the_text(generate):
    texts = {generate("The river", "--num-loops", str(k))[1] for k in (1, 3, 9)}
    assert len(texts) == 3


def test_sampling_depends_on_its_seed_and_on_nothing_else(generate):
    drawn = [generate("A", "--temperature", "2", "--seed", str(seed), "--json")[1] for seed in (1, 2, 1)]
    ids = [[token["id"] for token in results(each)[0]["tokens"]] for each in drawn]
    assert ids[0] == ids[2] != ids[1]


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(generate):
    free = results(generate("The river", "--json")[1])[0]
    place = next(n for n, token in enumerate(free["tokens"]) if n and len(token["text"]) == 1 and token["id"] < 128)
    stop = free["tokens"][place]["text"]
    made = results(generate("The river", "--json", "--stop", stop)[1])[0]
    assert made["finish"] == "stop"
    assert made["text"] == free["text"].split(stop)[0]
    assert len(made["tokens"]) <= place + 1


def test_a_prompt_that_is_too_long_is_an_error_and_truncation_is_explicit(generate):
    long = "".join(chr(65 + number % 26) for number in range(60))
    code, out, err = generate(long)
    assert (code, out) == (2, "")
    assert "60 tokens, and the model takes 48" in err and "--truncate" in err
    code, out, err = generate(long, "--truncate", "--json")
    assert code == 0
    kept = results(generate(long[-42:], "--json")[1])[0]
    assert results(out)[0]["tokens"] == kept["tokens"]


def test_a_prompt_that_fits_is_not_truncated_however_many_tokens_are_asked_for(generate):
    prompt = "0123456789" * 4
    whole = results(generate(prompt, "--json", "--max-tokens", "48")[1])[0]
    assert whole["finish"] == "context" and len(whole["tokens"]) == 8
    assert results(generate(prompt, "--json", "--max-tokens", "48", "--truncate")[1])[0] == whole


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "give prompts as arguments, or a file of them with --prompts-file"),
        (("A", "--prompts-file", "-"), "give prompts as arguments"),
        (("A", "--prompts-file", "nowhere.txt"), "give prompts as arguments"),
        (("--prompts-file", "nowhere.txt"), "No such file"),
        (("A", "--temperature", "-1"), "--temperature"),
        (("A", "--top-k", "0"), "--top-k"),
        (("A", "--num-loops", "0"), "--num-loops"),
        (("A", "--stop", ""), "--stop"),
        (("A", "--dtype", "int8"), "float32, bfloat16, float16"),
        (("A", "--device", "tpu9"), "--device"),
        (("A", "--cache-policy", "ring"), "exact, last-loop, first-loop, first-then-last, ring-N, last-exited"),
        (("A", "--cache-policy", "ring-2", "--prefill-policy", "last-loop"), "must be exact or that of decoding"),
        (("A", "--cache-polcy", "ring-2"), "--cache-policy"),
        (("A", "--max-tokens", "0"), "--max-tokens"),
        (("",), "an argument is empty"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_what_is_allowed(generate, flags, words):
    code, out, err = generate(*flags)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_a_file_of_prompts_without_prompts_or_of_other_bytes_is_refused(generate, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "has no prompts" in generate("--prompts-file", str(tmp_path / "empty.txt"))[2]
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in generate("--prompts-file", str(tmp_path / "binary.txt"))[2]
    assert generate("--prompts-file", str(tmp_path))[0] == 2


def test_a_target_without_a_tokenizer_is_told_how_to_name_one(generate):
    code, _, err = generate("A", tokenizer=None)
    assert code == 2 and "name one with --tokenizer" in err


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> str:
    """A model without a cache, from a factory in the working folder."""
    source = """
import torch, loopscope as ls
def build():
    table = torch.nn.Embedding(256, 8)
    network = torch.nn.ModuleDict({"table": table, "mix": torch.nn.Linear(8, 8)})
    return ls.adapt(
        embed=lambda ids: table(ids).cumsum(1),
        loop=lambda h, k: h + torch.tanh(network["mix"](h)),
        readout=lambda h, k: h @ table.weight.T,
        num_loops=2,
        module=network,
    )
"""
    (tmp_path / "cacheless.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cacheless", raising=False)
    yield "cacheless:build"
    sys.modules.pop("cacheless", None)


def test_a_factory_without_a_cache_works_slowly_and_says_so(generate, stranger):
    code, out, err = generate("The river", of=stranger)
    assert code == 0 and out.startswith("The river")
    assert re.fullmatch(r"loopscope: cacheless:build takes no cache: every token runs the whole text again\n", err)
    code, _, err = generate("The river", "--cache-policy", "last-loop", of=stranger)
    assert code == 2 and "the cache policy last-loop needs a key-value cache" in err


@pytest.mark.parametrize("policy", ["last-loop", "first-loop", "first-then-last", "ring-2", "last-exited"])
def test_every_policy_generates_and_last_exited_is_exact_where_nobody_leaves(generate, policy):
    exact = results(generate("The river", "--json")[1])[0]
    for prefill in ("exact", policy):
        flags = ("--cache-policy", policy, "--prefill-policy", prefill)
        made = results(generate("The river", "--json", *flags)[1])[0]
        assert len(made["tokens"]) == 6
        assert (policy == "last-exited") <= (made["text"] == exact["text"])


def test_lower_precision_generates_from_the_same_model(generate):
    exact = results(generate("The river", "--json")[1])[0]["tokens"][0]
    for dtype in ("bfloat16", "float16"):
        first = results(generate("The river", "--json", "--dtype", dtype)[1])[0]["tokens"][0]
        assert first["id"] == exact["id"] and first["logprob"] == pytest.approx(exact["logprob"], abs=0.1)
        assert first["logprob"] != exact["logprob"]


def test_the_function_streams_pieces_and_returns_what_they_make_up(target):
    heard: dict[int, list[str]] = {0: [], 1: []}
    made = ls.generate(
        target, ["The river", "Of"], tokenizer="bytes", max_tokens=8, temperature=1.5, seed=4,
        on_text=lambda number, text: heard[number].append(text),
    )  # fmt: skip
    assert [str(each) for each in made] == ["".join(each) for each in heard.values()]
    assert [each.prompt for each in made] == ["The river", "Of"]
    assert all(each.loops == 8 * 3 for each in made)
    assert all(piece for each in heard.values() for piece in each)


def test_the_function_refuses_an_option_that_does_not_exist(target):
    with pytest.raises(TypeError, match="temprature"):
        ls.generate(target, "A", tokenizer="bytes", temprature=1.0)


def test_a_target_that_knows_its_end_of_text_stops_there_and_leaves_it_out():
    model = ls.build(ls.preset("demo").model, seed=0).eval()
    opened = ls.Opened(name="here", model=model, vocab_size=512, tokenizer=bytes_tokenizer(), max_length=128)
    free = ls.generate(opened, "The river", max_tokens=6)
    end = free.tokens[3].id
    ended = ls.generate(ls.Opened(**{**vars(opened), "end_ids": (end,)}), "The river", max_tokens=6)
    until = next(n for n, token in enumerate(free.tokens) if token.id == end)
    assert ended.finish == "end-of-text"
    assert ended.text == bytes_tokenizer().decode([token.id for token in free.tokens[:until]])
