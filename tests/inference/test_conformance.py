"""`loopscope check`: what conforms passes, planted faults are found and named, and what does not apply says so."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import OURO, VOCABULARY, ouro_tensors, save_folder
from faulty import CONFIG, FAULTS, LoopsShareASlot

import loopscope as ls
from loopscope.cli import main
from loopscope.errors import ConfigError, ProtocolError
from loopscope.inference.comparison import Computed, Stage, Tolerance, compare
from loopscope.inference.conformance import CHECKS, carry_out, check_all, claims
from loopscope.inference.subjects import LoopedSubject, WholeSubject
from loopscope.model.looped_lm import build
from loopscope.results.check import CheckFinding

NAMES = [
    *("two-runs", "depth", "causal", "neighbours", "slots", "cached", "split", "ragged", "padded", "rollback"),
    *("mixed-depths", "context"),
]
DESIGNS = {
    "the paper's": {"positions": "learned", "inter_loop_norm": "none"},
    "ouro": {
        "norm_placement": "sandwich", "readout": "rmsnorm", "share_readout_norm": True, "exit_gate": True,
        "tie_head": False, "init": "scaled",
    },
    "huginn": {
        "prelude_layers": 1, "coda_layers": 1, "injection": "concat", "state_init": "noise", "norm_placement": "sum",
        "inter_loop_norm": "none",
    },
    "parcae": {"injection": "diagonal", "state_init": "zeros", "prelude_layers": 2},
    "gated injection, normformer, layernorm": {
        "injection": "gated", "norm_placement": "normformer", "norm": "layernorm", "inter_loop_norm": "layernorm",
    },
    "grouped keys, qk-norm, loop embedding, damping": {
        "num_kv_heads": 2, "qk_norm": True, "loop_embedding": True, "spectral_damping": True,
    },
    "deepnorm, a deep coda, gelu": {"norm_placement": "deepnorm", "coda_layers": 2, "mlp": "gelu", "readout": "raw"},
}  # fmt: skip


def statuses(result):
    return {check.name: check.status for check in result.checks}


# --- what conforms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", DESIGNS)
def test_our_designs_conform_at_every_depth(design):
    model = build(replace(CONFIG, **DESIGNS[design]), seed=0).eval()
    result = ls.check(model, context=24)
    assert [finding.text for finding in result.findings] == []
    assert statuses(result) == dict.fromkeys(NAMES, "passed") | {"padded": "not applicable"}
    assert (result.num_loops, result.deepest, result.dtype) == (3, 5, "float64")
    assert result.check("cached").flips == 0 and result.check("cached").choices == 3 * 12 * 5


def test_every_loop_of_a_model_without_a_cache_is_checked_and_what_needs_a_cache_is_not_applicable():
    table = torch.nn.Embedding(50, 16)
    core = torch.nn.Linear(16, 16)
    model = ls.adapt(
        embed=table, loop=lambda h, k: h + torch.tanh(core(h)), readout=lambda h, k: h @ table.weight.T, num_loops=3
    )
    result = ls.check(model)
    applied = [name for name, status in statuses(result).items() if status == "passed"]
    assert applied == ["two-runs", "depth", "causal", "neighbours"] and result.findings == []
    assert result.dtype == "float32" and "does not run in float64" in result.notes[0]
    assert "takes no cache" in result.check("cached").reason
    assert "does not say how many tokens" in result.check("context").reason


def test_an_ouro_folder_conforms(tmp_path, capsys):
    folder = save_folder(tmp_path / "ouro", OURO, ouro_tensors(OURO))
    assert main(["check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "4 loops, run to 6" in out and "11 passed, 0 found, 1 not applicable" in out


@pytest.fixture(scope="module")
def hrm():
    """transformers' own class, small."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    config = transformers.HrmTextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        head_dim=8, max_position_embeddings=96, H_cycles=2, L_cycles=2, initializer_range=0.25,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.HrmTextForCausalLM(config).eval()
        torch.nn.init.normal_(network.model.z_L_init)
    return network


def test_an_hrm_text_folder_conforms_and_takes_rows_at_different_loops(hrm, tmp_path):
    hrm.save_pretrained(tmp_path)
    result = ls.check(tmp_path)
    assert [finding.text for finding in result.findings] == []
    assert {statuses(result)[name] for name in ("mixed-depths", "context", "ragged")} == {"passed"}


def test_a_model_of_transformers_is_checked_as_it_is_and_comes_back_as_it_was(hrm):
    before = {name: tensor.clone() for name, tensor in hrm.state_dict().items()}
    result = ls.check(hrm)
    assert [finding.text for finding in result.findings] == []
    applied = {name for name, status in statuses(result).items() if status == "passed"}
    assert applied == {*NAMES, "generate"} - {"depth", "ragged", "mixed-depths", "context"}
    assert (result.dtype, result.num_loops) == ("float64", None)
    after = hrm.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hrm.modules())


def test_a_check_is_known_by_its_definition_and_nothing_else(monkeypatch):
    monkeypatch.setattr("loopscope.inference.conformance.CHECKS", dict(CHECKS))

    @claims("silent", "the first text says nothing", "loops")
    def silent(subject):
        yield CheckFinding(text=f"it has {subject.tokens} tokens")

    result = ls.check(build(CONFIG, seed=0).eval(), context=24)
    assert result.checks[-1].name == "silent" and [each.text for each in result.findings] == ["it has 12 tokens"]


# --- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.model.__name__}-{fault.part}")
def test_a_planted_fault_is_found_by_its_check_with_loop_layer_and_position(fault):
    subject = LoopedSubject(fault.build().double(), CONFIG.vocab_size, CONFIG.max_length)
    result = carry_out(CHECKS[fault.check], subject)
    assert result.status == "found"
    first = result.findings[0]
    assert (first.part, first.loop, first.layer, first.position) == (
        fault.part,
        fault.loop,
        fault.layer,
        fault.position,
    )
    assert first.difference is None or first.difference > 100 * subject.tolerance.value


def test_the_first_check_that_finds_a_fault_is_the_one_that_names_it():
    for fault in FAULTS[::8]:
        found = [
            name
            for name, status in statuses(check_all(LoopedSubject(fault.build(), 37, 24))).items()
            if status == "found"
        ]
        assert found[0] == fault.check


def test_nothing_is_said_of_the_rest_when_two_runs_do_not_agree():
    (fault,) = [fault for fault in FAULTS if fault.check == "two-runs"]
    result = check_all(LoopedSubject(fault.build(), CONFIG.vocab_size, CONFIG.max_length))
    assert statuses(result) == dict.fromkeys(NAMES, "not applicable") | {"two-runs": "found"}
    assert "two runs of the same text differ" in result.check("cached").reason


def test_a_way_that_a_model_cannot_go_is_a_finding_with_the_place_of_the_error():
    class NoRagged(ls.LoopedLM):
        def embed(self, ids_BT, cache=None):
            if cache is not None and len(cache.positions(1)) > 1:
                raise RuntimeError("one position for all rows")
            return super().embed(ids_BT, cache)

    result = check_all(LoopedSubject(NoRagged(CONFIG).eval(), CONFIG.vocab_size, CONFIG.max_length))
    assert [name for name, status in statuses(result).items() if status == "found"] == ["ragged"]
    assert "test_conformance.py" in result.findings[0].text
    assert result.findings[0].raised == "RuntimeError: one position for all rows"


def test_a_cache_path_that_cannot_be_widened_is_checked_in_the_models_own_dtype():
    class FloatMask(ls.LoopedLM):
        def embed(self, ids_BT, cache=None):
            assert cache is None or self.embedding.weight.dtype == torch.float32, "the cache's mask is float32"
            return super().embed(ids_BT, cache)

    result = ls.check(FloatMask(CONFIG), context=24)
    assert result.findings == [] and result.dtype == "float32"
    assert "the cache's mask is float32" in result.notes[0]


def test_a_depth_limit_is_noted_and_checks_stop_there():
    class AtMostThree(ls.LoopedLM):
        def loop(self, state, k, cache=None):
            if max(k if isinstance(k, tuple) else (k,)) > 3:
                raise IndexError("no fourth loop")
            return super().loop(state, k, cache)

    result = check_all(LoopedSubject(AtMostThree(CONFIG).eval(), CONFIG.vocab_size, CONFIG.max_length))
    assert result.deepest == 3 and result.findings == []
    assert "beyond the trained 3 are refused (IndexError: no fourth loop)" in result.notes[0]


# --- planted faults in models of transformers ------------------------------------------------------------------------


def faulty_network(hrm, **changes):
    """The same weights under a class with one method changed."""
    import copy

    network = copy.deepcopy(hrm)
    network.__class__ = type("Faulty", (type(hrm),), changes)
    return network


def test_a_mask_lost_in_decoding_is_found_in_a_model_of_transformers(hrm):
    whole = type(hrm).forward

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **more):
        decoding = past_key_values is not None and past_key_values.get_seq_length() > 0
        mask = None if decoding else attention_mask
        return whole(self, input_ids, attention_mask=mask, past_key_values=past_key_values, **more)

    result = ls.check(faulty_network(hrm, forward=forward))
    assert [name for name, status in statuses(result).items() if status == "found"] == ["padded", "generate"]
    first = result.check("padded").findings[0]
    # Row 1 has 9 tokens after 3 of padding, of which the last 3 are decoded; its first attention sees the padding.
    assert (first.row, first.position, first.part) == (1, 6, "model.L_module.layers.0.self_attn")
    assert (first.loop, first.layer) == (1, 0)


def test_padding_that_is_attended_to_is_found_in_a_model_of_transformers(hrm):
    whole = type(hrm).forward

    def forward(self, input_ids=None, attention_mask=None, **more):
        return whole(self, input_ids, **more)

    result = ls.check(faulty_network(hrm, forward=forward))
    first = result.check("padded").findings[0]
    assert (first.row, first.position) == (1, 0) and "padded by 3 tokens" in first.text
    assert result.check("cached").status == "passed"


def test_loops_that_share_a_slot_are_found_in_a_model_of_transformers(hrm):
    network = faulty_network(hrm)
    for module in network.modules():
        if type(module).__name__ == "HrmTextAttention":
            own = type(module).forward

            def forward(*given, _own=own, _module=module, cycle_offset=0, **more):
                return _own(_module, *given, cycle_offset=0, **more)

            module.forward = forward
    result = ls.check(network)
    first = result.check("slots").findings[0]
    assert (first.part, first.loop, first.layer) == ("model.L_module.layers.0.self_attn", 2, 0)
    assert "share one memory" in first.text


# --- comparing -------------------------------------------------------------------------------------------------------


def record(values):
    made = Computed()
    made.keep(Stage(1, "logits"), range(len(values)), torch.tensor(values))
    return made


def test_a_difference_is_relative_to_the_rms_of_what_is_expected_and_flips_are_counted():
    compared = compare(record([[30.0, 40.0], [44.0, 40.0]]), record([[30.0, 40.0], [30.0, 40.0]]), 0.1)
    assert compared.first.position == 1
    assert compared.first.size == pytest.approx(14 / 50)
    assert (compared.tokens, compared.differing, compared.choices, compared.flips) == (2, 1, 2, 1)


def test_what_is_not_a_number_is_infinitely_far():
    assert compare(record([[float("nan"), 1.0]]), record([[1.0, 1.0]]), 0.1).largest == float("inf")


def test_the_tolerance_grows_with_what_a_rounding_grows_to_and_at_most_64_fold():
    derived = Tolerance.of(torch.float32, 16, 0.0).value
    assert derived == pytest.approx(8 * 2**-23 * 4)
    assert Tolerance.of(torch.float64, 16, 0.0).value == derived
    assert Tolerance.of(torch.float32, 16, 5 * 2**-23).value == pytest.approx(5 * derived)
    assert Tolerance.of(torch.float32, 16, 1.0).value == pytest.approx(64 * derived)


def test_a_model_that_makes_roundings_grow_conforms_in_float32():
    table = torch.nn.Embedding(50, 16)
    core = torch.randn(16, 16) / 2
    model = ls.adapt(
        embed=table, loop=lambda h, k: torch.sin(h @ core), readout=lambda h, k: h @ table.weight.T, num_loops=3
    )
    result = check_all(LoopedSubject(model, 50))
    assert result.findings == [] and result.tolerance > 4 * Tolerance.of(torch.float32, 5, 0.0).value


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def factories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from faulty import CONFIG, LoopsShareASlot\ndef build():\n    return LoopsShareASlot(CONFIG)\n"
    (tmp_path / "their_loops.py").write_text(code)
    yield "their_loops:build"
    sys.modules.pop("their_loops", None)


def test_findings_are_printed_and_the_exit_code_is_1(factories, capsys):
    assert main(["check", factories]) == 1
    out, err = capsys.readouterr()
    assert "slots: core layer 0 of loop 2 writes the slot ('core', 1, 0)" in out
    assert "share one memory" in out and "tolerance" in out
    assert "50%" in err


def test_json_has_every_check_with_its_findings(factories, capsys):
    assert main(["check", factories, "--context", "24", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in result["checks"]] == NAMES
    slots = next(check for check in result["checks"] if check["name"] == "slots")
    assert slots["status"] == "found"
    assert {name: slots["findings"][0][name] for name in ("part", "loop", "layer", "position")} == {
        "part": "core", "loop": 2, "layer": 0, "position": 1,
    }  # fmt: skip
    assert result["target"] == factories and result["num_loops"] == 3 and result["dtype"] == "float64"


def test_a_factory_may_return_a_model_of_transformers(hrm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hrm.save_pretrained(tmp_path / "weights")
    (tmp_path / "their_hrm.py").write_text(
        "import transformers\ndef build():\n    return transformers.HrmTextForCausalLM.from_pretrained('weights')\n"
    )
    assert main(["check", "their_hrm:build"]) == 0
    out = capsys.readouterr().out
    assert "loops inside" in out and "9 passed, 0 found, 4 not applicable" in out
    sys.modules.pop("their_hrm", None)


def test_a_context_is_not_asked_of_a_model_of_transformers(hrm):
    with pytest.raises(ConfigError, match="--context"):
        ls.check(hrm, context=96)


def test_a_context_too_short_for_ragged_rows_is_refused():
    with pytest.raises(ConfigError, match="too short to be checked"):
        check_all(LoopedSubject(build(replace(CONFIG, max_length=4), seed=0).eval(), CONFIG.vocab_size, 4))


def test_a_model_that_cannot_run_a_text_at_all_is_the_users_mistake():
    def broken(h, k):
        raise ValueError("no loops today")

    model = ls.adapt(embed=torch.nn.Embedding(9, 4), loop=broken, readout=lambda h, k: h, num_loops=2)
    with pytest.raises(ProtocolError, match="no loops today"):
        check_all(LoopedSubject(model, 9))


def test_an_unknown_device_is_named(capsys):
    assert main(["check", "preset:demo", "--device", "abacus"]) == 2
    assert "--device" in capsys.readouterr().err


def test_a_faulty_model_comes_back_as_it_was():
    model = LoopsShareASlot(CONFIG)
    ls.check(model, context=24)
    assert model.training and next(model.parameters()).dtype == torch.float32


def test_a_model_that_is_run_through_the_function_of_black_boxes_needs_only_logits():
    class OnlyLogits:
        vocab_size, device, takes_mask, end_ids = 11, torch.device("cpu"), False, ()
        table = torch.randn(11, 11, dtype=torch.float64)

        def logits(self, ids_BT, memory=None, mask_BS=None, on_write=None):
            return self.table[ids_BT]

        def logits_of_rounded(self, ids_BT):
            return self.table[ids_BT]

        def new_memory(self):
            return None

    result = check_all(WholeSubject(OnlyLogits()))
    applied = [name for name, status in statuses(result).items() if status != "not applicable"]
    assert applied == ["two-runs", "causal", "neighbours"] and result.findings == []
