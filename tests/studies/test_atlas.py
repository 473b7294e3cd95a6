"""The atlas: which rows it lays out, what it reads from them, and what stands in a cell when something is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from atlas_samples import LOOPS, MODERN, ON_HOPS, PAPER, audited, entry, probe, sample_atlas, scores, write_atlas
from made_up import made_up_audit, made_up_eval, sample_manifest, write_sample

import loopscope as ls
from loopscope.cli import main
from loopscope.designs import DESIGNS, Design
from loopscope.errors import ConfigError, RunError, UnsupportedError
from loopscope.model.looped_lm import build
from loopscope.options import AtlasOptions, parse_designs
from loopscope.results.atlas import NOT_BUILT, AtlasRecord
from loopscope.results.record import as_json, decode, encode, write_record
from loopscope.results.run import RowRecord
from loopscope.rows import probing
from loopscope.rows.ledger import Ledger, has_probe, is_complete
from loopscope.studies import atlas
from loopscope.studies.atlas import collect, note_request, read_atlas
from loopscope.studies.atlas_properties import PROPERTIES, atlas_tables, cell_of, free_range_and_growth

QUIET = lambda text: None  # noqa: E731


def cell(of: str, given) -> tuple[str, str]:
    made = cell_of(given, next(each for each in PROPERTIES if each.key == of))
    return made.text, made.tone


# --- the rows --------------------------------------------------------------------------------------------------------


def test_every_design_is_asked_for_under_both_recipes_and_six_at_most_chase_pointers():
    rows, refused = atlas.lay_out(AtlasOptions())
    assert refused == [] and len({row.name for row in rows}) == len(rows)
    for recipe in ("paper", "modern"):
        assert [row.condition for row in rows if row.recipe == recipe and not row.text] == list(DESIGNS)
    hops = [row for row in rows if row.text]
    assert {row.condition for row in hops} == set(atlas.ON_HOPS) & set(DESIGNS) and len(atlas.ON_HOPS) <= 6
    assert all(row.config.data.data == ("task:hops:8",) and row.config.training.steps == 1000 for row in hops)
    assert all(row.probe and row.audit and row.audit_untrained for row in rows)


def test_recipes_differ_in_initialisation_and_positions_and_a_design_keeps_them():
    paper, modern = (
        next(row.config for row in atlas.lay_out(AtlasOptions(designs=("huginn",)))[0] if row.recipe == recipe)
        for recipe in ("paper", "modern")
    )
    assert (paper.model.positions, paper.model.init) == ("learned", "pytorch-default")
    assert (modern.model.positions, modern.model.init, modern.training.warmup) == ("rope", "scaled", 20)
    assert paper.model.injection == modern.model.injection == "concat"


@pytest.mark.parametrize("steps", [1, 20, 2000])
def test_pointer_chasing_can_be_as_short_or_as_long_as_one_likes_or_left_out(steps):
    (row,) = [row for row in atlas.lay_out(AtlasOptions(designs=("ouro",), hops_steps=steps))[0] if row.text]
    assert row.config.training.steps == steps and row.config.training.warmup <= max(1, steps // 20)
    assert not [row for row in atlas.lay_out(AtlasOptions(hops_steps=0))[0] if row.text]


def test_a_design_that_cannot_be_built_is_told_and_the_others_are_laid_out(monkeypatch):
    def refuses(base):
        """Never built."""
        raise ConfigError("width = 64: odd widths only")

    monkeypatch.setitem(DESIGNS, "refuses", Design("refuses", "Refuses", "nobody", refuses))
    rows, refused = atlas.lay_out(AtlasOptions(designs=("ouro", "refuses"), hops_steps=0))
    assert [row.condition for row in rows] == ["ouro", "ouro"]
    assert [(each.design, each.setting, each.state) for each in refused] == [
        ("refuses", PAPER, NOT_BUILT),
        ("refuses", MODERN, NOT_BUILT),
    ]
    assert cell("trained", refused[0]) == (NOT_BUILT, "bad") and "odd widths" in refused[0].error


def test_names_of_designs_come_in_the_order_of_the_registry_and_a_wrong_one_gets_a_suggestion():
    assert parse_designs("ouro, paper-raw") == ("paper-raw", "ouro")
    assert parse_designs("all") == tuple(DESIGNS)
    with pytest.raises(ConfigError, match="ouro"):
        parse_designs("ouroo")
    with pytest.raises(ConfigError, match="designs"):
        parse_designs(",")


# --- the cells -------------------------------------------------------------------------------------------------------


def test_growth_is_measured_against_the_untrained_state_and_to_thirty_loops():
    found = entry("ouro", untrained=audited(start=10.0, growth=1.0), trained=audited(start=200.0, growth=1.1))
    assert found.growth_in_training == pytest.approx(200 * 1.1 ** (LOOPS - 1) / 10)
    assert found.growth_beyond == pytest.approx(1.1 ** (30 - LOOPS))
    short = replace(found, trained=replace(found.trained, norms=found.trained.norms[:12]))
    assert short.growth_beyond is None and cell("far", short) == ("finite to loop 12", "bad")
    overflown = replace(found, trained=replace(found.trained, norms=[1.0, 1e9, None]))
    assert cell("far", overflown) == ("finite to loop 2", "bad")
    assert free_range_and_growth(overflown)[1] == float("inf"), "it has its place in the chart all the same"
    assert cell("far", replace(found, trained=None)) == ("–", "")


def test_growth_is_told_from_where_to_where_and_is_bad_only_where_something_is_blind():
    fresh, grown = audited(start=0.2, growth=1.0), audited(start=20.0, growth=1.0)
    blind = entry("ouro", untrained=fresh, trained=grown)
    assert cell("growth", blind) == ("×100 (0.200 → 20.0)", "bad")
    seen = replace(blind, trained=replace(audited("visible", 1.1), norms=grown.norms))
    assert cell("growth", seen) == ("×100 (0.200 → 20.0)", "open")
    assert cell("growth", replace(blind, trained=fresh)) == ("×1.00 (0.200 → 0.200)", "good")


def test_a_cell_names_blind_variables_first_with_their_free_ranges():
    assert cell("trained", entry("ouro")) == ("scale blind without limit; mean visible 1.02-fold", "bad")
    held = entry("ouro", trained=audited("removed", None))
    assert cell("trained", held) == ("mean visible 1.02-fold; scale removed", "good")
    assert free_range_and_growth(held)[0] == 1.02, "what the loop removes is not free"


@pytest.mark.parametrize(
    ("key", "changes", "expected"),
    [
        ("beyond", {"scores": scores(beyond=0.5)}, ("broken from 5", "bad")),
        ("beyond", {"scores": scores(beyond=0.05)}, ("worse from 5", "open")),
        ("beyond", {"scores": scores(beyond=-0.05)}, ("better to 8", "good")),
        ("cache", {"probe": probe(safe=False)}, ("exact only", "")),
        ("cache", {}, ("last-loop (decode only), 25%", "good")),
        ("exit", {}, ("+0.50 nats, not yet computed", "")),
        ("motion", {"probe": probe(fixed=0.1)}, ("90% slider, 10% fixed", "")),
        ("score", {"scores": scores(ce=6.0)}, ("6.000", "bad")),
        ("cost", {}, ("1.38 MFLOP, 164 k weights", "")),
        ("growth", {"untrained": None}, ("–", "")),
        ("exit", {"state": "failed", "error": "it broke", "probe": None}, ("failed", "bad")),
    ],
)
def test_a_cell_says_what_was_measured_or_what_happened(key, changes, expected):
    assert cell(key, entry("ouro", **changes)) == expected


def test_a_task_that_is_not_learnt_leaves_its_cells_empty_but_for_the_fresh_model_and_the_score():
    lost = entry("ouro", ON_HOPS, scores=scores(right=0.1))
    told = {each.key: cell_of(lost, each).text for each in PROPERTIES}
    assert told.pop("score") == "10% right" and "blind" in told.pop("untrained")
    assert set(told.values()) == {"not learnt"}
    assert free_range_and_growth(lost) is None
    assert cell("trained", entry("ouro", ON_HOPS))[0].startswith("scale blind")


def test_there_is_a_table_for_every_setting_with_a_row_for_every_design_that_was_asked():
    tables = {table.name: table for table in atlas_tables(sample_atlas())}
    assert list(tables) == ["atlas-paper", "atlas-modern", "atlas-hops"]
    assert len(tables["atlas-modern"].rows) == len(DESIGNS) and len(tables["atlas-hops"].rows) == 2
    assert tables["atlas-modern"].rows[3][2] == "failed"


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_atlas_json_says_is_what_was_found(tmp_path):
    assert read_atlas(write_atlas(tmp_path)) == sample_atlas()
    text = (tmp_path / "atlas.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))


def test_what_follows_from_the_rest_is_in_the_file_and_is_not_believed_when_read(tmp_path):
    content = as_json(sample_atlas())
    first = content["entries"][0]
    assert first["growth_beyond"] == pytest.approx(1.1**26) and first["beyond"].startswith("Beyond the trained 4")
    forged = decode(encode({**content, "entries": [{**first, "growth_beyond": 1.0}]}), AtlasRecord)
    assert forged.entries[0].growth_beyond == pytest.approx(1.1**26)


@pytest.mark.parametrize("damage", ['{"schema_version": 1}', "not JSON", "[]"])
def test_a_damaged_atlas_is_refused_with_what_to_do(tmp_path, damage):
    (tmp_path / "atlas.json").write_text(damage)
    with pytest.raises(RunError, match=r"atlas\.json .*; move it away and run its command again"):
        read_atlas(tmp_path)


def test_a_folder_without_one_is_told_how_to_make_it(tmp_path):
    with pytest.raises(RunError, match="loopscope atlas --out"):
        read_atlas(tmp_path)


def test_a_second_request_is_added_and_one_with_other_steps_is_refused(tmp_path):
    whole = sample_atlas()
    first = replace(whole, designs=whole.designs[:2], entries=whole.entries[:2])
    note_request(tmp_path, first)
    second = replace(whole, designs=whole.designs[1:3], entries=[], commands=[["loopscope", "atlas", "--designs", "x"]])
    note_request(tmp_path, second)
    joined = read_atlas(tmp_path)
    assert {each.name for each in joined.designs} == {each.name for each in whole.designs[:3]}
    assert joined.entries == first.entries and len(joined.commands) == 2
    note_request(tmp_path, replace(second, asked=replace(second.asked, hops_steps=0)))
    with pytest.raises(RunError, match=r"--steps 300, not 30; choose another --out"):
        note_request(tmp_path, replace(second, asked=replace(second.asked, steps=30)))


# --- rows on disk ----------------------------------------------------------------------------------------------------


def write_row(out: Path, spec, *, state: str = "finished", audit: str = "per-loop+rmsnorm", error=None) -> Path:
    """A row as its process leaves it, with the made-up numbers of a grid's row."""
    steps = spec.config.training.steps
    fresh, trained = made_up_audit(audit, 20.0, step=None), made_up_audit(audit, 400.0, step=steps)
    return write_sample(
        out / "rows" / spec.name,
        spec.config,
        manifest=sample_manifest(["loopscope", "atlas"], spec.seed),
        eval=made_up_eval([4.5, 4.4, 4.4, 4.4], 400.0, step=steps),
        audit=trained,
        audit_untrained=fresh,
        probe=probe(step=steps),
        row=RowRecord(condition=spec.condition, recipe=spec.recipe, text=spec.text, seed=42, state=state, error=error),
    )


@pytest.fixture
def laid(tmp_path):
    """A noted request for two designs, and its rows."""
    rows, refused = atlas.lay_out(AtlasOptions(designs=("paper-raw", "ouro")))
    record = replace(sample_atlas(), entries=refused)
    note_request(tmp_path, replace(record, designs=[d for d in record.designs if d.name in ("paper-raw", "ouro")]))
    return tmp_path, {row.name: row for row in rows}


def test_rows_become_entries_in_the_order_of_the_registry_and_of_the_settings(laid):
    out, rows = laid
    for name in ("ouro-s42", "ouro-modern-hops-s42", "paper-raw-modern-s42"):
        write_row(out, rows[name])
    found = collect(out).entries
    assert [(each.design, each.setting) for each in found] == [
        ("paper-raw", MODERN),
        ("ouro", PAPER),
        ("ouro", ON_HOPS),
    ]
    assert found[1].growth_in_training == pytest.approx(20.0, rel=0.1) and found[1].trained.blind == ["scale"]
    assert found[1].probe == probe(step=400) and found[1].ce == 4.4
    assert read_atlas(out).entries == found, "written back"


def test_a_failed_row_keeps_what_it_measured_and_a_damaged_file_is_told(laid):
    out, rows = laid
    write_row(out, rows["ouro-s42"], state="failed", error="no memory")
    (write_row(out, rows["ouro-modern-s42"]) / "probe.json").write_text("{")
    failed, damaged = collect(out).entries
    assert failed.error == "no memory" and failed.trained is not None
    assert damaged.probe is None and "not valid JSON" in damaged.problems["probe.json"]
    assert cell("motion", damaged)[0] == "–"


def test_an_atlas_whose_rows_are_gone_stays_what_it_was(tmp_path):
    write_atlas(tmp_path)
    assert collect(tmp_path) == sample_atlas()


def test_a_row_is_not_finished_before_everything_was_probed_or_told(laid):
    out, rows = laid
    spec = rows["ouro-s42"]
    folder = write_row(out, spec)
    assert is_complete(folder, spec) and Ledger(out).status(spec).state == "finished"
    write_record(folder / "probe.json", replace(probe(step=400), motion=None))
    assert not has_probe(folder, 400) and Ledger(out).status(spec).state == "open"
    write_record(folder / "probe.json", replace(probe(step=400), motion=None, problems={"motion": "it ends"}))
    assert has_probe(folder, 400) and not has_probe(folder, 399)
    assert is_complete(folder, replace(spec, probe=False))
    (folder / "audit.json").unlink()
    assert not is_complete(folder, spec)
    told = replace(probe(step=400), problems={"trained": "a derivative is not finite"})
    write_record(folder / "probe.json", told)
    assert is_complete(folder, spec) and not is_complete(folder, replace(spec, probe=False)), "told, in an atlas alone"


def test_an_audit_that_fails_is_told_in_its_cell():
    failed = entry("ouro", trained=None, probe=replace(probe(), problems={"trained": "not finite"}))
    assert cell("trained", failed) == ("failed", "bad") and cell("motion", failed)[0].startswith("90% fixed")
    bare = entry("ouro", probe=replace(probe(), cache=None, problems={"cache": "keeps no keys"}))
    assert cell("cache", bare) == ("not offered", "open")


# --- probing ---------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_products_that_a_token_goes_through():
    config = ls.ModelConfig(vocab_size=32, width=16, num_layers=2, num_loops=3, num_heads=2, max_length=8, mlp_width=24)
    tokens = 8
    layer = 2 * (4 * 16 * 16 + 3 * 16 * 24) + 4 * tokens * 16  # attention's maps, SwiGLU's three, scores and their sum
    expected = tokens * (3 * 2 * layer + 2 * 16 * 32)
    assert probing.counted_flops(build(config, seed=0), torch.zeros(1, tokens, dtype=torch.long)) == expected


def test_what_a_design_does_not_offer_is_told_and_the_rest_is_measured(monkeypatch):
    def breaks(*args, exit_gap=False, **kwargs):
        raise UnsupportedError("no exits here") if exit_gap else RuntimeError("a kernel\n is missing")

    monkeypatch.setattr(probing, "evaluate", breaks)
    monkeypatch.setattr(probing, "tokens_for", lambda *_: None)
    monkeypatch.setattr(probing, "evaluation_batches", lambda *_: iter([(ids, None)]))
    config = replace(ls.preset("demo").model, width=16, num_layers=1, num_heads=2, vocab_size=256, max_length=16)
    model = build(config, seed=0)
    ids = torch.arange(16)[None]
    found = probing.probe(ls.Opened(model=model, name="x", vocab_size=256, max_length=16, batches=[ids]), QUIET)
    assert found.problems == {"exit_gap": "no exits here", "cache": "a kernel is missing"}
    assert found.motion is not None and found.cost.parameters == sum(w.numel() for w in model.parameters())
    assert found.cost.cache_bytes_per_token is None


# --- for real --------------------------------------------------------------------------------------------------------


def test_two_steps_of_one_design_make_an_atlas_that_resumes_and_rebuilds(tmp_path, capsys):
    out = tmp_path / "atlas"
    command = ["atlas", "--designs", "paper-rmsnorm", "--steps", "2", "--hops-steps", "0", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert [each["recipe"] for each in found["entries"]] == ["paper", "modern"]
    for each in found["entries"]:
        assert each["state"] == "finished"
        assert each["trained"]["verdict"] == each["untrained"]["verdict"] == "blind-spot"
        assert each["probe"]["problems"] == {} and each["probe"]["exit_gap"]["loop"] == 1
        assert len(each["trained"]["norms"]) == 30 and each["growth_beyond"] > 1
    assert "about 0:" in told.err, "how long it will take is said beforehand"
    page = (out / "atlas.html").read_text()
    assert main(command) == 0
    assert "finished already" in capsys.readouterr().err
    assert main(["atlas", "--rebuild", "--out", str(out)]) == 0
    assert (out / "atlas.html").read_text() == page and "blind variable in 2 of 2" in capsys.readouterr().out
    row = next((out / "rows").glob("*/row.json"))
    row.write_text(json.dumps({**json.loads(row.read_text()), "state": "failed", "error": "no room"}))
    assert main(["atlas", "--rebuild", "--out", str(out)]) == 1, "a row that failed is a finding"
    assert f"{row.parent.name} failed: no room" in capsys.readouterr().out
    assert main([*command[:4], "3", *command[5:]]) == 2, "other steps need another folder"
    assert "choose another --out" in capsys.readouterr().err
