"""Entry point of `hf-dspark`. Sub-commands load models only when they run, so a wrong option is told at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    name="hf-dspark",
    help="DSpark speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; the chat template is applied.")],
    drafter: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled one.")] = None,
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the drafter's own.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answer.")] = 200,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    confidence_threshold: Annotated[
        Optional[float], typer.Option(help="Stop a draft at the first slot below it, in [0, 1].")
    ] = None,
    num_draft_tokens: Annotated[
        Optional[int], typer.Option(help="Verify at most so many drafts a round, up to the block size.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Also time plain generation, interleaved.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of coloured text.")] = False,
) -> None:
    """Answer a prompt with a drafter at work, token by token."""
    from .generate import run

    run(
        prompt,
        drafter=drafter,
        target=target,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        confidence_threshold=confidence_threshold,
        num_draft_tokens=num_draft_tokens,
        dtype=dtype,
        compare=compare,
        as_json=as_json,
    )


@app.command()
def measure(
    prompts: Annotated[list[Path], typer.Argument(help="JSONL files with `turns` or `messages`.")],
    drafter: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled one.")] = None,
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the drafter's own.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of each answer.")] = 200,
    limit: Annotated[Optional[int], typer.Option(min=1, help="Prompts taken from each file.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    speed: Annotated[bool, typer.Option("--speed", help="Also time plain generation, interleaved.")] = False,
) -> None:
    """Accepted length, and speed if asked, over files of prompts."""
    from .measure import run

    run(
        prompts,
        drafter=drafter,
        target=target,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        limit=limit,
        dtype=dtype,
        seed=seed,
        speed=speed,
    )


@app.command()
def train(
    responses: Annotated[Path, typer.Argument(help="JSONL of `prompt_ids` and the target's own `response_ids`.")],
    output: Annotated[
        Path, typer.Argument(help="Folder for checkpoints and the drafter; an interrupted run resumes.")
    ],
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled target.")] = None,
    eval_responses: Annotated[
        Optional[Path], typer.Option(help="The same with the target's greedy answers to held-out prompts.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 2,
    block_size: Annotated[int, typer.Option(min=1, help="Draft tokens of a round.")] = 7,
    target_layers: Annotated[
        Optional[str], typer.Option(help="Layers that feed the drafter, such as 1,8,15,22,28; default: five, spread.")
    ] = None,
    mask_token_id: Annotated[
        Optional[int],
        typer.Option(help="A token that never occurs in text; needed unless the target is the bundled one."),
    ] = None,
    markov_rank: Annotated[
        int, typer.Option(min=0, help="0 trains DFlash: no sequential and no confidence head.")
    ] = 64,
    draft_vocab_size: Annotated[
        Optional[int], typer.Option(min=1, help="Most frequent tokens that can be drafted; default: all.")
    ] = None,
    copy_layers: Annotated[
        Optional[str], typer.Option(help="Target layers to start from, one a drafter layer, such as 28,29.")
    ] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 10_000,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 4,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks drawn from a sequence.")] = 32,
    eval_steps: Annotated[int, typer.Option(min=1, help="Steps between evaluations and checkpoints.")] = 500,
    seed: Annotated[int, typer.Option(help="Of weights, order and anchors.")] = 0,
) -> None:
    """Train a drafter for a target: cache its features once, then optimise the DSpark objective."""
    from .train import run

    run(
        responses,
        output,
        target=target,
        eval_responses=eval_responses,
        layers=layers,
        block_size=block_size,
        target_layers=target_layers,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        draft_vocab_size=draft_vocab_size,
        copy_layers=copy_layers,
        max_steps=max_steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        anchors=anchors,
        eval_steps=eval_steps,
        seed=seed,
    )


@app.command()
def env() -> None:
    """Versions and device, for bug reports."""
    from .env import run

    run()


def main() -> None:
    """Runs the command line; a known mistake is one line on stderr and exit status 1, without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        message = " ".join(line.strip() for line in str(error).splitlines())  # transformers' own span several lines
        typer.secho(f"hf-dspark: {message}", fg=typer.colors.RED, err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.secho("hf-dspark: stopped.", err=True)
        sys.exit(130)
