"""``dynamo-megatron eval`` from its arguments to the files it leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.cli import main
from dynamo_megatron.evaluate.options import as_options
from dynamo_megatron.evaluate.samples import SampleFile

SMALL = ["--data", "arithmetic:5", "--max-tokens", "40", "--batch-size", "8"]


def evaluate(out, *options: str) -> int:
    return main(["eval", "builtin:tiny", *SMALL, "--out", str(out), *options])


def lines(out) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def result(out) -> dict:
    return json.loads((out / "summary.json").read_text())["results"][-1]


def test_an_evaluation_leaves_samples_figures_pictures_and_a_page(tmp_path, capsys):
    out = tmp_path / "out"
    assert evaluate(out, "--samples", "4", "--seed", "3") == 0
    assert {path.name for path in out.iterdir()} == {
        "samples.jsonl",
        "settings.json",
        "summary.json",
        "index.html",
        "plots",
    }
    rows = lines(out)
    assert len(rows) == 20
    right = sum(row["reward"] for row in rows)
    assert result(out)["pass_at_1"]["mean"] == pytest.approx(right / 20)
    printed = capsys.readouterr().out
    assert "pass@4" in printed and str(out / "index.html") in printed


def test_the_same_command_repeats_itself_and_goes_on_from_what_is_there(tmp_path):
    assert evaluate(tmp_path / "a", "--samples", "2") == 0
    assert evaluate(tmp_path / "b", "--samples", "2") == 0
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    before = (tmp_path / "a" / "samples.jsonl").read_bytes()
    assert evaluate(tmp_path / "a", "--samples", "2") == 0
    assert (tmp_path / "a" / "samples.jsonl").read_bytes() == before
    assert evaluate(tmp_path / "a", "--samples", "3") == 0
    assert (tmp_path / "a" / "samples.jsonl").read_bytes().startswith(before)
    assert result(tmp_path / "a")["num_samples"] == 15


def test_greedy_decoding_takes_one_sample_whatever_the_seed(tmp_path):
    assert evaluate(tmp_path / "a", "--greedy") == 0
    assert evaluate(tmp_path / "b", "--greedy", "--seed", "9") == 0
    assert [row["response"] for row in lines(tmp_path / "a")] == [
        row["response"] for row in lines(tmp_path / "b")
    ]


def test_a_verifier_that_always_fails_says_why_and_is_no_success(tmp_path, capsys):
    verifier = "tests.unit.reward.verifiers:behave"  # raises on what is no action
    assert evaluate(tmp_path, "--verifier", verifier) == 1
    summary = result(tmp_path)
    assert (summary["errors"], summary["num_problems"]) == (5, 0)
    assert summary["pass_at_1"] is None
    assert {row["status"] for row in lines(tmp_path)} == {"error"}
    said = capsys.readouterr().err
    assert "5 of 5 samples could not be verified and are in no rate:" in said
    assert said.count("1 x error: KeyError: ") == 3 and "and 2 more kinds" in said


def verifier_file(folder, body: str, monkeypatch) -> str:
    (folder / "verifier_of_a_test.py").write_text(f"def score(response, answer, prompt):\n{body}")
    monkeypatch.syspath_prepend(folder)
    return "verifier_of_a_test:score"


def test_the_most_frequent_failures_are_named_and_some_of_them_are_no_error(
    tmp_path, monkeypatch, capsys
):
    body = "    if '+' in prompt: raise ValueError('no \\x1b[2J sums')\n    return 1.0\n"
    name = verifier_file(tmp_path, body, monkeypatch)
    data = tmp_path / "d.jsonl"
    problems = ("Compute 3-1", "Compute 1+1", "Compute 1+2")
    data.write_text("".join(json.dumps({"problem": p, "answer": "2"}) + "\n" for p in problems))
    options = ["--data", str(data), "--verifier", name]
    assert evaluate(tmp_path / "out", *options) == 0
    said = capsys.readouterr().err
    assert "2 of 3 samples could not be verified" in said
    assert "  2 x error: ValueError: no ?[2J sums\n" in said


def test_a_sample_is_right_from_the_given_reward(tmp_path, monkeypatch):
    name = verifier_file(tmp_path, "    return 0.5\n", monkeypatch)
    out = tmp_path / "out"
    for options, rate in (([], 1.0), (["--right-from", "0.75"], 0.0)):
        assert evaluate(out, "--verifier", name, *options) == 0
        assert result(out)["pass_at_1"]["mean"] == rate
        word = '"outcome": "right"' if rate else '"outcome": "wrong"'
        assert (out / "index.html").read_text().count(word) == 5
    assert json.loads((out / "settings.json").read_text())["right_from"] == 0.75


def test_an_edited_verifier_does_not_mix_with_its_verdicts_of_before(tmp_path, monkeypatch, capsys):
    name = verifier_file(tmp_path, "    return 1.0\n", monkeypatch)
    out = tmp_path / "out"
    assert evaluate(out, "--verifier", name) == 0
    assert evaluate(out, "--verifier", name, "--samples", "2") == 0
    verifier_file(tmp_path, "    return 0.0\n", monkeypatch)
    assert evaluate(out, "--verifier", name, "--samples", "3") == 2
    assert "verifier_source (the file that defines the verifier) was" in capsys.readouterr().err
    assert len(lines(out)) == 10


def test_a_changed_chat_template_does_not_mix_with_the_samples_of_before(tmp_path, capsys):
    def command(model, samples):
        options = ["--samples", str(samples), "--out", str(tmp_path / "out")]
        return main(["eval", str(model), *SMALL, *options])

    model, copy = (shutil.copytree(TINY_POLICY, tmp_path / n / "model") for n in "ab")
    assert command(model, 1) == 0
    # An identical folder elsewhere, of another time, is the same model.
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    shutil.rmtree(model)
    copy.rename(model)
    assert command(model, 2) == 0
    template = model / "chat_template.jinja"
    template.write_text("Please. " + template.read_text())
    assert command(model, 3) == 2
    assert "text_files (tokenizer, chat template and configuration" in capsys.readouterr().err
    assert len(lines(tmp_path / "out")) == 10


def test_a_second_evaluation_into_the_same_folder_is_refused_at_once(tmp_path, capsys, monkeypatch):
    assert evaluate(tmp_path) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("dynamo_megatron.evaluate.build.build_engine", None)  # it never gets there
    with SampleFile(tmp_path / "samples.jsonl"):
        assert evaluate(tmp_path, "--samples", "2") == 2
        assert "another evaluation is writing" in capsys.readouterr().err
        now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert now == before


def test_several_sources_have_a_row_each(tmp_path):
    for name, answer in (("easy", "2"), ("wrong", "77777")):
        record = {"problem": "Compute 1+1+0", "answer": answer}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    data = [str(tmp_path / "easy.jsonl"), str(tmp_path / "wrong.jsonl")]
    out = tmp_path / "out"
    command = ["eval", "builtin:tiny", "--data", *data, "--max-tokens", "40", "--out", str(out)]
    assert main(command) == 0
    results = json.loads((out / "summary.json").read_text())["results"]
    assert [row["source"] for row in results] == ["easy", "wrong", "all"]
    assert results[1]["pass_at_1"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "nowhere.json"], "nowhere.json does not exist"),
        (["--verifier", "nonsense"], "not of the form module:function"),
        (["--engine", "vlm"], "no engine 'vlm'"),
        (["--max-prompt-tokens", "1"], "longer than"),
        (["--replicas", "2"], "--replicas 2 --tensor-parallel 1 with --engine hf"),
        (["--tensor-parallel", "4"], "--replicas 1 --tensor-parallel 4 with --engine hf"),
        (["--template", "raw", "--append", "x", "--data", "README.txt"], "README.txt does not"),
    ],
)
def test_what_cannot_be_used_is_one_message_and_exit_code_2(tmp_path, capsys, options, words):
    assert evaluate(tmp_path / "out", *options) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "samples.jsonl").exists()


PROBLEM = '{"problem": "Compute 1+1", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.jsonl", '{"problem": "Compute 1+1", "solution": "2"}\n', []),
        ("a.jsonl", '{"problem": 1, "answer": "2"}\n', []),
        ("a.jsonl", '{"problem": "Compute 1+1", "answer": null}\n', []),
        ("a.jsonl", f"[{PROBLEM}]", []),
        ("a.json", PROBLEM + PROBLEM, []),
        ("a.json", PROBLEM, []),
        ("a.parquet", "no parquet", []),
        ("a.jsonl", PROBLEM, ["--max-prompt-tokens", "1"]),
        ("a.jsonl", PROBLEM, ["--verifier", "nonsense"]),
        ("a.jsonl", PROBLEM, ["--verifier", "no_such_module:score"]),
        ("a.jsonl", PROBLEM.replace('"2"', '"two"'), ["--verifier", "integer_answer"]),
        (
            "a.json",
            '[{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],'
            ' "answer": "2"}]',
            ["--template", "raw"],
        ),
    ],
)
def test_no_message_asks_for_a_key_that_an_evaluation_does_not_have(
    tmp_path, capsys, name, content, options
):
    (tmp_path / name).write_text(content)
    command = ["eval", "builtin:tiny", "--data", str(tmp_path / name), *options]
    assert main([*command, "--out", str(tmp_path / "out")]) in (1, 2)
    said = capsys.readouterr().err.partition("dynamo-megatron eval: ")[2]
    assert said and not re.search("(of|for) (this|the) source|set kind", said)
    if re.search(r"\b(data|reward|model|rollout)\.[a-z_]+", said):
        assert re.search(r"of a run, --[a-z-]+ of eval", said)
    for key in ("answer_key", "problem_key", "(kind)"):
        assert key not in said or "a run's configuration" in said


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["eval", str(tmp_path / "gone"), *SMALL]) == 2
    said = capsys.readouterr().err
    assert "does not exist" in said and "model.path" not in said
    assert main(["eval", "builtin:huge", *SMALL]) == 2
    said = capsys.readouterr().err
    assert "built-in models are builtin:tiny" in said and "model.path" not in said


@pytest.mark.parametrize(
    "options",
    [
        ["--samples", "0"],
        ["--temperature", "0"],
        ["--temperature", "nan"],
        ["--seed", "-1"],
        ["--greedy", "--samples", "4"],
        ["--sample", "4"],
        ["--right-from", "nan"],
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(tmp_path, options):
    with pytest.raises(SystemExit) as caught:
        evaluate(tmp_path, *options)
    assert caught.value.code == 2


def test_other_settings_do_not_mix_with_the_samples_of_a_folder(tmp_path, capsys):
    assert evaluate(tmp_path) == 0
    before = (tmp_path / "samples.jsonl").read_bytes()
    assert evaluate(tmp_path, "--temperature", "0.5") == 2
    assert "temperature was 1.0, is 0.5" in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_killed_evaluation_ends_with_the_samples_of_an_uninterrupted_one(tmp_path):
    options = ["--data", "arithmetic:40", "--samples", "4", "--max-tokens", "40"]
    options += ["--batch-size", "4"]
    assert main(["eval", "builtin:tiny", *options, "--out", str(tmp_path / "whole")]) == 0
    out = tmp_path / "cut"
    command = [
        sys.executable,
        "-c",
        "import sys; from dynamo_megatron.cli import main; sys.exit(main(sys.argv[1:]))",
        *["eval", "builtin:tiny", *options, "--out", str(out)],
    ]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if (out / "samples.jsonl").exists() and (out / "samples.jsonl").stat().st_size > 4000:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert main(["eval", "builtin:tiny", *options, "--out", str(out)]) == 0
    assert sorted(map(str, lines(out))) == sorted(map(str, lines(tmp_path / "whole")))
    assert result(out) == result(tmp_path / "whole")


def test_the_rollout_tier_is_told_of_in_the_options_of_the_command():
    said = "rollout.vllm.tensor=3: lower rollout.max_tokens or rollout.vllm.kv_cache_mib."
    assert as_options(said) == "--tensor-parallel=3: lower --max-tokens or --kv-cache-mib."


def test_replicas_that_cannot_be_are_refused_in_the_options_of_the_command(tmp_path, capsys):
    command = ["eval", "builtin:tiny", "--data", "arithmetic:2", "--engine", "vllm"]
    command += ["--tensor-parallel", "3", "--max-tokens", "32", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert "--tensor-parallel=3 does not divide the 8 attention heads" in capsys.readouterr().err
