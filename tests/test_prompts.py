"""Prompts: files and datasets are read, broken lines are named and counted."""

import builtins

import pytest

from hf_dspark.evaluation.prompts import REPORTED, load_prompts, read_prompts

LINES = [
    '{"turns": ["w9 w10", "w11"], "domain": "math"}',
    "",
    '{"turns": ["w9"',
    '{"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w10"}]}',
    '{"turns": "w9"}',
    '{"messages": [{"role": "assistant", "content": "w10"}]}',
    '{"messages": [{"content": "w10"}]}',
    '{"turns": [" "]}',
    "[1, 2]",
    '{"turns": null, "messages": [{"role": "system", "content": "w8"}, {"role": "user", "content": "w12"}]}',
]


def test_broken_lines_are_named_and_the_rest_is_read(tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\n".join(LINES).encode() + b'\n{"turns": ["w9 \xff"]}\n{"turns": ["w13"]}\n')
    prompts, broken = load_prompts(path)
    assert [(prompt.index, prompt.messages[-1]["content"], prompt.domain) for prompt in prompts] == [
        (0, "w9 w10", "math"),
        (3, "w9", None),
        (9, "w12", None),
        (11, "w13", None),
    ]
    assert prompts[2].messages[0] == {"role": "system", "content": "w8"}
    assert broken == [2, 4, 5, 6, 7, 8, 10]
    named = [record.message.split(" in line ")[1].split(" of ")[0] for record in caplog.records]
    assert named == ["3", "5", "6", "7", "8", "9", "11"]
    assert load_prompts(path, limit=2) == (prompts[:2], [2])
    with pytest.raises(ValueError, match="in line 3 of"):
        read_prompts(path, None)


def test_many_broken_lines_are_not_all_named(tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    path.write_text("{}\n" * (REPORTED + 5) + '{"turns": ["w9"]}')
    assert len(load_prompts(path)[1]) == REPORTED + 5
    assert len(caplog.records) == REPORTED + 1
    assert "5 more lines of" in caplog.text


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets


def test_a_folder_is_a_dataset(datasets, tmp_path):
    folder = tmp_path / "parquet"
    folder.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w10"}], "domain": "code"},
        {"messages": [], "domain": None},
        {"messages": [{"role": "user", "content": "w11"}], "domain": None},
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "test-00000.parquet")
    prompts, broken = load_prompts(folder, split="test")
    assert [(prompt.index, prompt.messages, prompt.domain) for prompt in prompts] == [
        (0, rows[0]["messages"][:1], "code"),
        (2, rows[2]["messages"], None),
    ]
    assert broken == [1]
    with pytest.raises(OSError, match=r"got .* Check name, split and connection"):
        load_prompts(folder, split="validation")


def test_what_is_no_dataset_is_said(datasets, tmp_path, monkeypatch):
    with pytest.raises(
        OSError, match=r"got nobody/nothing with .* a local JSONL file with `turns` or `messages` needs"
    ):
        load_prompts("nobody/nothing")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"question": "w9"}\n')
    with pytest.raises(ValueError, match=r"Expected a column `turns` or `messages` in .*, got question"):
        load_prompts(folder)
    with pytest.raises(FileNotFoundError, match=r"got no file at nowhere\.jsonl"):
        load_prompts("nowhere.jsonl")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install hf-dspark\[train\]"):
        load_prompts(folder)
