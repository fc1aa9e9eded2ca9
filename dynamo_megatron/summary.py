"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

from dynamo_megatron.state import LoopState


def summarize(run_dir: Path, state: LoopState, num_steps: int) -> str:
    """Held-out pass@1 before and after, what was left out, where the files are, what to do next."""
    export = run_dir / "hf" / f"step_{state.step:06d}"
    lines = [f"{state.step} of {num_steps} steps done."]
    if state.evaluations:
        first, last = state.evaluations[0], state.evaluations[-1]
        lines.append("held-out pass@1 (95 % interval):")
        for result in (first, last) if last.step != first.step else (first,):
            lines.append(
                f"  after {result.step:4d} steps  {100 * result.pass_at_1:5.1f} %  "
                f"({100 * result.low:.1f} to {100 * result.high:.1f}, {result.num_problems} "
                f"problems, right format {100 * result.format_rate:.1f} %)"
            )
        lines += [f"    {detail}" for detail in last.details()]
    counters = state.counters
    lines += [
        f"left out or lost: {counters.truncated} truncated responses (scored as they stand), "
        f"{counters.verifier_failures} failed verifications, {counters.skipped_updates} updates "
        f"with non-finite gradients, {counters.skipped_steps} steps without a response to train on",
        "files:",
        f"  {run_dir / 'plots' / 'overview.png'}",
        f"  {run_dir / 'metrics.jsonl'}, {run_dir / 'tensorboard'}",
        f"  {run_dir / 'generations' / 'generations.md'}, {run_dir / 'evaluations'}",
        f"  {run_dir / 'checkpoints'}, {run_dir / 'config.yaml'}",
    ]
    page = run_dir / "evaluations" / f"step_{state.step:06d}" / "index.html"
    if page.exists():
        lines.append(f"  {page}  (held-out responses to read)")
    if export.exists():
        lines.append(f"  {export}  (Hugging Face format)")
    lines += ["next:", *_next_steps(run_dir, state, num_steps, export)]
    return "\n".join(lines)


def _next_steps(run_dir: Path, state: LoopState, num_steps: int, export: Path) -> list[str]:
    if state.step < num_steps:
        return ["  the same command with run.resume=if_present goes on from here"]
    twice = 2 * max(num_steps, state.step)
    longer = (
        f"  go on training:  dynamo-megatron train --config {run_dir / 'config.yaml'} "
        f"run.resume=if_present run.num_steps={twice}   (under torchrun for several ranks)"
    )
    if not export.exists():
        return [longer]
    load = f"AutoModelForCausalLM.from_pretrained('{export}')"
    return [
        longer,
        f"  evaluate it:     dynamo-megatron eval {export} --data FILE --samples 4",
        f"  use the policy:  transformers.{load}",
    ]
