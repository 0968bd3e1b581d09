"""What `import nmt` offers: the same results as the command line, from Python."""

import json
import shutil

import nmt
from nmt.pipeline import engine


def test_a_pipeline_that_is_up_to_date_is_not_run_again(pipeline_run, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(pipeline_run, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(engine, "act", lambda stage: 1 / 0)
    made = nmt.run_pipeline(nmt.load_config("tiny.yaml"))
    scores = json.loads((made.evaluate.writes / "scores.json").read_text())["scores"]
    assert 0 <= scores["bleu"]["value"] <= 100


def test_a_pipeline_runs_as_far_as_it_is_asked_to(pipeline_run, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(pipeline_run / "data/mini/raw", folder / "data/mini/raw")
    shutil.copy(pipeline_run / "tiny.yaml", folder)
    monkeypatch.chdir(folder)
    made = nmt.run_pipeline(nmt.load_config("tiny.yaml", ["bpe.vocab_size=1000"]), upto="bpe")
    assert sum(1 for _ in (made.bpe.writes / "joint.vocab").read_text().splitlines()) == 1000
    assert not made.encode.writes.exists()


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert all(hasattr(nmt, name) for name in nmt.__all__)
    assert not hasattr(nmt, "Translater")
