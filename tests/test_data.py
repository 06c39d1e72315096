"""Training data: answers are the target's own, a run that died ends up as if it had not, bad rows are counted."""

import json

import pytest
import torch

from chat import END, WORDS, chat_target, chat_tokenizer, rows_of
from hf_dspark import fingerprint
from hf_dspark.evaluation.prompts import Prompt, load_prompts
from hf_dspark.training import responses as responses_module
from hf_dspark.training import synthesis as synthesis_module
from hf_dspark.training.data import read_samples
from hf_dspark.training.responses import answer_prompts, encode_prompt, end_tokens
from hf_dspark.training.synthesis import LEADING, PATIENCE, TurnFilter, synthesize, user_turn, write_user_turns
from tiny import VOCAB, tiny_target


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def target():
    return chat_target()


def ask(*texts, domain=None):
    return [Prompt([{"role": "user", "content": text}], index, domain) for index, text in enumerate(texts)]


PROMPTS = ask(*(" ".join(WORDS[8 + (5 * n + 3 * k) % 36] for k in range(1 + 7 * n % 11)) for n in range(10)))


def dies_at(monkeypatch, module, call):
    """From now on batch number `call` of a module is interrupted once; returns the sizes of the batches that ran."""
    real, ran = module.generate_batch, []

    def generate_batch(target, prompts, **options):
        if len(ran) + 1 == call:
            monkeypatch.setattr(module, "generate_batch", watched)
            raise KeyboardInterrupt
        return watched(target, prompts, **options)

    def watched(target, prompts, **options):
        ran.append(len(prompts))
        return real(target, prompts, **options)

    monkeypatch.setattr(module, "generate_batch", generate_batch)
    return ran


# ------------------------------------------------------------------ answers


def plain(target, tokenizer, prompt, tokens):
    ids = encode_prompt(tokenizer, prompt.messages, None)
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return ids, target.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@pytest.fixture
def ending(target, tokenizer, monkeypatch):
    """The target with a second end token that greedy answers really reach, at different lengths."""
    answers = [plain(target, tokenizer, prompt, 12)[1] for prompt in PROMPTS]

    def lengths(token):
        return {answer.index(token) if token in answer else 12 for answer in answers}

    varied = max((token for token in range(VOCAB) if 12 in lengths(token)), key=lambda token: len(lengths(token)))
    monkeypatch.setattr(target.generation_config, "eos_token_id", [END, varied])
    return target


def test_answers_are_those_of_plain_generation_one_by_one(ending, tokenizer, tmp_path):
    answered = answer_prompts(ending, tokenizer, PROMPTS, tmp_path / "a.jsonl", max_new_tokens=12, batch_size=4)
    rows = {row["index"]: row for row in rows_of(tmp_path / "a.jsonl")}
    expected = {prompt.index: plain(ending, tokenizer, prompt, 12) for prompt in PROMPTS}
    expected = {index: answer for index, answer in expected.items() if len(answer[1]) >= 2}
    assert {index: (row["prompt_ids"], row["response_ids"]) for index, row in rows.items()} == expected
    lengths = {len(response) for _, response in expected.values()}
    assert 12 in lengths
    assert len(lengths) > 2
    assert len({len(ids) for ids, _ in expected.values()}) > 4  # padding was at work
    for _, response in expected.values():
        assert len(response) == 12 or response[-1] in end_tokens(ending)
        assert not set(response[:-1]) & set(end_tokens(ending))
    assert answered.prompts == len(rows)
    assert answered.tokens == answered.new_tokens == sum(len(row["response_ids"]) for row in rows.values())
    samples = read_samples(tmp_path / "a.jsonl", vocab_size=VOCAB)
    assert len(samples) == len(rows)


def test_a_row_holds_domain_and_temperature(target, tokenizer, tmp_path):
    prompts = [*ask("w9", domain="math"), Prompt([{"role": "user", "content": "w10 w11"}], 7)]
    answer_prompts(target, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=4, temperature=0.5, seed=1)
    first, second = rows_of(tmp_path / "a.jsonl")
    assert first["domain"] == "math"
    assert "domain" not in second
    assert (first["index"], second["index"], first["temperature"]) == (0, 7, 0.5)


@pytest.mark.parametrize(("temperature", "end"), [(0.0, None), (0.0, END), (1.0, None), (1.0, END)])
def test_an_interrupted_run_ends_as_an_unbroken_one(target, tokenizer, tmp_path, monkeypatch, temperature, end):
    monkeypatch.setattr(target.generation_config, "eos_token_id", end)
    options = {"max_new_tokens": 10, "batch_size": 3, "temperature": temperature}
    answer_prompts(target, tokenizer, PROMPTS, tmp_path / "whole.jsonl", **options)
    ran = dies_at(monkeypatch, responses_module, 3)
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(target, tokenizer, PROMPTS, tmp_path / "broken.jsonl", **options)
    half = len(rows_of(tmp_path / "broken.jsonl"))
    assert 0 < half < len(rows_of(tmp_path / "whole.jsonl"))
    assert end is not None or half == 6
    torch.manual_seed(99)
    answered = answer_prompts(target, tokenizer, PROMPTS, tmp_path / "broken.jsonl", **options)
    again = [3] if half < 6 else []  # an empty answer of the last batch looks like one that was not written
    assert ran == [3, 3, *again, 3, 1]
    assert (tmp_path / "broken.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert answered.prompts + answered.empty == len(PROMPTS)
    assert answered.new_tokens < answered.tokens
    repeated = answer_prompts(target, tokenizer, PROMPTS, tmp_path / "broken.jsonl", **options)
    assert repeated.new_tokens == 0
    assert (repeated.prompts, repeated.tokens) == (answered.prompts, answered.tokens)


@pytest.mark.parametrize("cut", [7, 200, 600])
def test_a_half_written_line_is_dropped(target, tokenizer, tmp_path, cut):
    """The file ends in the middle of a line, of a batch, or of an earlier batch."""
    path, options = tmp_path / "a.jsonl", {"max_new_tokens": 10, "batch_size": 4, "temperature": 1.0}
    answer_prompts(target, tokenizer, PROMPTS, path, **options)
    whole = path.read_bytes()
    assert len(whole) > 2 * cut
    path.write_bytes(whole[:-cut])
    assert not whole[:-cut].endswith(b"\n")
    answer_prompts(target, tokenizer, PROMPTS, path, **options)
    assert path.read_bytes() == whole


def test_sampling_depends_on_seed_and_leaves_the_random_state_alone(target, tokenizer, tmp_path, monkeypatch):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = {"max_new_tokens": 10, "temperature": 1.0, "seed": seed}
        answer_prompts(target, tokenizer, PROMPTS, tmp_path / f"{name}.jsonl", **options)
    a, b, c = ((tmp_path / f"{name}.jsonl").read_text() for name in "abc")
    assert a == b != c
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in {"top_k": 1, "top_p": 0.1, "temperature": 0.1}.items():  # a target's own habits
        monkeypatch.setattr(target.generation_config, key, value)
    answer_prompts(target, tokenizer, PROMPTS, tmp_path / "d.jsonl", max_new_tokens=10, temperature=1.0)
    assert (tmp_path / "d.jsonl").read_text() == a


CHANGES = {
    "temperature": {"temperature": 1.0},
    "max_new_tokens": {"max_new_tokens": 5},
    "batch_size": {"batch_size": 2},
    "seed": {"seed": 1},
    "chat_template_kwargs": {"chat_template_kwargs": {"slowly": True}},
    "prompts_sha256": {"prompts": PROMPTS[:2] + PROMPTS[3:4]},
    "target_fingerprint": {"target": tiny_target(dtype=torch.float32, num_hidden_layers=2, seed=1)},
    "dtype": {"target": tiny_target(dtype=torch.float64, num_hidden_layers=2)},
}


@pytest.mark.parametrize("key", CHANGES)
def test_other_settings_are_refused(target, tokenizer, tmp_path, key):
    given = {"target": target, "prompts": PROMPTS[:3], "output": tmp_path / "a.jsonl", "max_new_tokens": 4}
    answer_prompts(tokenizer=tokenizer, **given)
    before = (tmp_path / "a.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"Expected rows with {key} = .*, got .* Give another file, or delete"):
        answer_prompts(tokenizer=tokenizer, **given | CHANGES[key])
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_the_settings_lie_beside_the_rows(target, tokenizer, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    options = {"max_new_tokens": 4, "chat_template_kwargs": {"slowly": True}}
    answer_prompts(target, tokenizer, PROMPTS[:2], path, **options)
    assert all(row["prompt_ids"][-1] == WORDS.index("w45") for row in rows_of(path))
    sidecar = tmp_path / "a.jsonl.json"
    recorded = json.loads(sidecar.read_text())
    assert recorded["target_fingerprint"] == fingerprint(target)
    assert recorded["chat_template_kwargs"] == {"slowly": True}
    assert recorded["generation_config"]["eos_token_id"] == END
    assert (recorded["temperature"], recorded["seed"], recorded["max_new_tokens"]) == (0.0, 0, 4)
    assert len(recorded["chat_template_sha256"]) == 16
    assert recorded["versions"].keys() == {"transformers", "torch"}

    sidecar.write_text(json.dumps({**recorded, "versions": {"transformers": "1.0"}}))
    answer_prompts(target, tokenizer, PROMPTS[:2], path, **options)
    assert "was begun with {'transformers': '1.0'}" in caplog.text
    sidecar.unlink()
    with pytest.raises(ValueError, match=r"Expected the settings of .* got no such file"):
        answer_prompts(target, tokenizer, PROMPTS[:2], path, **options)


def test_a_damaged_file_names_the_line(target, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    answer_prompts(target, tokenizer, PROMPTS[:3], path, max_new_tokens=4)
    path.write_text(path.read_text().replace("\n", "\n{]\n", 1))
    with pytest.raises(ValueError, match=r"got '\{\]\\n' in line 2"):
        answer_prompts(target, tokenizer, PROMPTS[:3], path, max_new_tokens=4)


def test_empty_answers_are_counted_and_left_out(target, tokenizer, tmp_path, monkeypatch):
    first = plain(target, tokenizer, PROMPTS[2], 4)[1][0]
    monkeypatch.setattr(target.generation_config, "eos_token_id", first)
    empty = sum(plain(target, tokenizer, prompt, 4)[1] == [first] for prompt in PROMPTS)
    assert 0 < empty < len(PROMPTS)
    for _ in range(2):  # and again by a run that has nothing to do
        answered = answer_prompts(target, tokenizer, PROMPTS, tmp_path / "a.jsonl", max_new_tokens=4, batch_size=4)
        assert (answered.empty, answered.prompts) == (empty, len(PROMPTS) - empty)
    assert 2 not in [row["index"] for row in rows_of(tmp_path / "a.jsonl")]


def test_prompts_that_cannot_be_asked_are_counted(tokenizer, tmp_path, caplog):
    short = tiny_target(dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=32)
    fits = len(encode_prompt(tokenizer, ask("w9")[0].messages, None))
    room = 32 - fits - 4  # words that leave room for exactly four tokens of an answer, besides the first
    prompts = ask("w9 " * (room + 1), "w9 " * (room + 2), "NO", "w10")
    answered = answer_prompts(short, tokenizer, prompts, tmp_path / "a.jsonl", max_new_tokens=4)
    assert [row["index"] for row in rows_of(tmp_path / "a.jsonl")] == [3, 0]
    assert (answered.prompts, answered.too_long, answered.refused, answered.empty) == (2, 1, 1, 0)
    assert "refuses prompt 2 (and perhaps others): not so" in caplog.text
    with pytest.raises(ValueError, match=r"leave room for 4 tokens .* of 32, got none \(1 too long, 1 refused\)"):
        answer_prompts(short, tokenizer, prompts[1:3], tmp_path / "b.jsonl", max_new_tokens=4)
    with pytest.raises(ValueError, match="different indices"):
        answer_prompts(short, tokenizer, ask("w9") * 2, tmp_path / "c.jsonl", max_new_tokens=4)


# ------------------------------------------------------------------ user turns


def test_the_user_turn_is_opened_by_the_template(tokenizer):
    prefix, closing = user_turn(tokenizer)
    assert prefix == "<|im_start|> system w46 <|im_end|> <|im_start|> user "
    assert closing == END


TEMPLATES = {
    "no template": (None, "Expected a tokenizer with a chat template"),
    "no text": ("<|im_start|>", "in one place, got 0"),
    "never closed": ("{{ messages[0]['content'] }}", "closes a user turn with a special token, got ''"),
    "closed by text": ("{{ messages[0]['content'] }} w9 ", "closes a user turn with a special token, got ' w9 '"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_without_a_user_turn_are_refused(tokenizer, monkeypatch, case):
    template, message = TEMPLATES[case]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=rf"{message}.* Give prompts to hf-dspark data regenerate"):
        user_turn(tokenizer)


# What the target writes after its opening, and why it is removed; <|im_end|> ends a turn.
PLANTED = [
    ("w20 w21 w22 w23 w24 <|im_end|>", None),
    ("w20 w21 <|im_end|>", "too short"),
    ("w21 w22 w23 w24 w25 w26 w27", "unfinished"),
    ("w21 w22 <pad> w23 w24 <|im_end|>", "with special tokens"),
    ("w21 w22 w21 w22 w21 w22 <|im_end|>", "repetitive"),
    ("w20 w21 w22 w23 w24 <|im_end|>", "duplicate"),
    ("w30 w31 w32 w33 w34 <|im_end|>", None),
    ("w31 w32 w33 w34 w35 w36 <|im_end|>", None),
    ("<|im_end|>", "too short"),
    ("w40 w41 w42 w43 w44 <|im_end|>", None),
]


def planted(monkeypatch, tokenizer):
    """Batches of four out of PLANTED instead of the target's; returns the prompts that were continued."""
    rows, asked = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in PLANTED], []

    def generate_batch(target, prompts, **options):
        asked.extend(prompts)
        return [rows[number % len(rows)] for number in range(len(asked) - len(prompts), len(asked))]

    monkeypatch.setattr(synthesis_module, "generate_batch", generate_batch)
    return asked


def test_each_filter_removes_its_own(target, tokenizer, tmp_path, monkeypatch):
    asked = planted(monkeypatch, tokenizer)
    options = {"count": 4, "openings": ["w8 w9"], "min_tokens": 3, "max_tokens": 6, "batch_size": 4}
    turns = write_user_turns(target, tokenizer, tmp_path / "p.jsonl", **options)
    good = [text.removesuffix(" <|im_end|>") for text, reason in PLANTED if reason is None]
    assert [prompt.messages[0]["content"] for prompt in turns.prompts] == [f"w8 w9 {text}" for text in good]
    reasons = [reason for _, reason in PLANTED if reason]
    assert turns.removed == {reason: reasons.count(reason) for reason in reasons}
    assert tokenizer.decode(asked[0]) == "<|im_start|> system w46 <|im_end|> <|im_start|> user w8 w9"
    assert [row["candidate"] for row in rows_of(tmp_path / "p.jsonl")] == [0, 6, 7, 9]
    assert load_prompts(tmp_path / "p.jsonl")[0] == turns.prompts
    again = write_user_turns(target, tokenizer, tmp_path / "p.jsonl", **options)
    assert again == turns
    assert len(asked) == 12


def test_openings_take_turns(target, tokenizer, tmp_path, monkeypatch):
    planted(monkeypatch, tokenizer)
    options = {"count": 3, "openings": ["w8 w9", " w10 "], "min_tokens": 1, "max_tokens": 6, "batch_size": 4}
    turns = write_user_turns(target, tokenizer, tmp_path / "p.jsonl", **options)
    texts = [prompt.messages[0]["content"] for prompt in turns.prompts]
    assert texts == ["w8 w9 w20 w21 w22 w23 w24", "w10 w20 w21", "w10 w20 w21 w22 w23 w24"]


def test_turns_that_differ_in_their_tail_only_are_one():
    turns = TurnFilter(min_tokens=1, special_ids=set())
    start = "Write What is the capital of the largest country on the continent of "
    assert len(start) > len("Write") + LEADING + 10
    turns.keep(start + "Asia?", "Write")

    def reason(text, opening="Write"):
        return turns.reason([1, 2, 3], text, opening, ended=True)

    assert reason(start + "Europe?") == "beginning like another"
    assert reason(start.replace("largest", "smallest") + "Asia?") is None
    assert reason(start + "Europe?", opening="Write What") is None
    assert reason((start + "asia").upper().replace(" ", "  ")) == "duplicate"
    assert reason(" ?! ") == "too short"


def test_a_target_without_more_turns_is_said(target, tokenizer, tmp_path, monkeypatch):
    asked = planted(monkeypatch, tokenizer)
    options = {"count": 9, "min_tokens": 3, "max_tokens": 6, "batch_size": 4}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Expected 9 different user turns, got 4 out of \d+ \(.*\d+ duplicate"):
            write_user_turns(target, tokenizer, tmp_path / "p.jsonl", **options)
    assert len(asked) < 2 * 4 * (PATIENCE + 5)
    with pytest.raises(ValueError, match="Expected 1 <= min_tokens <= max_tokens, got 7 and 6"):
        write_user_turns(target, tokenizer, tmp_path / "q.jsonl", **options | {"min_tokens": 7})


@pytest.mark.parametrize("call", [2, 4])
def test_interrupted_turns_end_as_unbroken_ones(target, tokenizer, tmp_path, monkeypatch, call):
    options = {"count": 12, "openings": ["w8", "w9 w10"], "min_tokens": 2, "max_tokens": 24, "batch_size": 6}
    whole = write_user_turns(target, tokenizer, tmp_path / "whole.jsonl", **options)
    texts = [prompt.messages[0]["content"] for prompt in whole.prompts]
    assert len(set(texts)) == len(texts) == 12
    assert "unfinished" in whole.removed
    dies_at(monkeypatch, synthesis_module, call)
    with pytest.raises(KeyboardInterrupt):
        write_user_turns(target, tokenizer, tmp_path / "broken.jsonl", **options)
    half = (tmp_path / "broken.jsonl").read_bytes()
    if call == 4:
        (tmp_path / "broken.jsonl").write_bytes(half[:-5])
    torch.manual_seed(99)
    assert write_user_turns(target, tokenizer, tmp_path / "broken.jsonl", **options) == whole
    assert (tmp_path / "broken.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert 0 < len(half) < len((tmp_path / "whole.jsonl").read_bytes())
    with pytest.raises(ValueError, match="Expected rows with openings"):
        write_user_turns(target, tokenizer, tmp_path / "broken.jsonl", **options | {"openings": ["w8"]})


def test_own_turns_are_answered_like_any_prompts(target, tokenizer, tmp_path):
    options = {"count": 5, "min_tokens": 2, "max_tokens": 24}
    turns, answered = synthesize(target, tokenizer, tmp_path / "a.jsonl", max_new_tokens=6, **options)
    assert answered.prompts + answered.empty == len(turns.prompts) == 5
    prompts, broken = load_prompts(tmp_path / "a.jsonl.prompts.jsonl")
    answer_prompts(target, tokenizer, prompts, tmp_path / "b.jsonl", max_new_tokens=6)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert broken == []
