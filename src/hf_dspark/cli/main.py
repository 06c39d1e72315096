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
    output: Annotated[
        Path, typer.Argument(help="Folder for checkpoints and the drafter; an interrupted run resumes.")
    ],
    responses: Annotated[
        Optional[list[Path]],
        typer.Option(help="JSONL of `prompt_ids` and the target's own `response_ids`; can be given several times."),
    ] = None,
    eval_responses: Annotated[
        Optional[Path], typer.Option(help="The same with the target's greedy answers to held-out prompts.")
    ] = None,
    preset: Annotated[
        Optional[str],
        typer.Option(help="smoke (a tiny target of its own, two minutes), smollm2 (the bundled drafter) or qwen3-4b."),
    ] = None,
    config_file: Annotated[
        Optional[Path], typer.Option("--config", help="YAML or JSON with the settings below; options win over it.")
    ] = None,
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled target.")] = None,
    start_from: Annotated[
        Optional[str],
        typer.Option(help="Drafter to go on training, folder or Hub id; it decides the shape; default: a new one."),
    ] = None,
    layers: Annotated[Optional[int], typer.Option(help="Layers of the drafter.")] = None,
    block_size: Annotated[Optional[int], typer.Option(help="Draft tokens of a round.")] = None,
    target_layers: Annotated[
        Optional[str], typer.Option(help="Layers that feed the drafter, such as 1,8,15,22,28; default: five, spread.")
    ] = None,
    mask_token_id: Annotated[
        Optional[int],
        typer.Option(help="A token that never occurs in text; needed unless the target is the bundled one."),
    ] = None,
    markov_rank: Annotated[
        Optional[int], typer.Option(help="0 trains DFlash: no sequential and no confidence head.")
    ] = None,
    markov_head_type: Annotated[Optional[str], typer.Option(help="vanilla, gated or rnn.")] = None,
    draft_vocab_size: Annotated[
        Optional[int], typer.Option(help="Most frequent tokens that can be drafted; default: all.")
    ] = None,
    copy_layers: Annotated[
        Optional[str], typer.Option(help="Target layers to start from, one a drafter layer, such as 28,29.")
    ] = None,
    online: Annotated[
        Optional[bool], typer.Option("--online/--cached", help="Run the target in every step, or store its features.")
    ] = None,
    bits: Annotated[Optional[int], typer.Option(help="Of cached features: 16 or 8.")] = None,
    max_length: Annotated[Optional[int], typer.Option(help="Tokens of a sample.")] = None,
    max_steps: Annotated[Optional[int], typer.Option(help="Optimiser steps.")] = None,
    learning_rate: Annotated[Optional[float], typer.Option(help="Peak learning rate.")] = None,
    batch_size: Annotated[Optional[int], typer.Option(help="Sequences a step, on each device.")] = None,
    anchors: Annotated[Optional[int], typer.Option(help="Blocks drawn from a sequence.")] = None,
    eval_steps: Annotated[Optional[int], typer.Option(help="Steps between evaluations and checkpoints.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="Of weights, order and anchors.")] = None,
) -> None:
    """Train a drafter for a target, on its own answers."""
    from .train import run

    run(
        output,
        responses=responses or [],
        eval_responses=eval_responses,
        preset=preset,
        config_file=config_file,
        target=target,
        start_from=start_from,
        layers=layers,
        block_size=block_size,
        target_layers=target_layers,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        draft_vocab_size=draft_vocab_size,
        copy_layers=copy_layers,
        online=online,
        bits=bits,
        max_length=max_length,
        max_steps=max_steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        anchors=anchors,
        eval_steps=eval_steps,
        seed=seed,
    )


data = typer.Typer(
    help="Training data: answers of the target, prompts of its own, features on disk.", no_args_is_help=True
)
app.add_typer(data, name="data")


@data.command()
def regenerate(
    prompts: Annotated[
        str, typer.Argument(help="JSONL file with `turns` or `messages`, or a folder or Hub name for `datasets`.")
    ],
    output: Annotated[Path, typer.Argument(help="JSONL file to write; an interrupted run resumes.")],
    split: Annotated[str, typer.Option(help="Of a dataset.")] = "train",
    limit: Annotated[Optional[int], typer.Option(min=1, help="Prompts taken.")] = None,
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled target.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of each answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 8,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="auto (bundled target: bfloat16), bfloat16, float16 or float32.")
    ] = "auto",
    chat_template_kwargs: Annotated[
        Optional[str], typer.Option(help="JSON object for the chat template, such as '{\"enable_thinking\": false}'.")
    ] = None,
) -> None:
    """Let the target answer prompts: what `hf-dspark train` learns from."""
    from .data import run_regenerate

    run_regenerate(
        prompts,
        output,
        split=split,
        limit=limit,
        target=target,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        chat_template_kwargs=chat_template_kwargs,
    )


@data.command()
def synthesize(
    output: Annotated[Path, typer.Argument(help="JSONL file to write; prompts go into OUTPUT.prompts.jsonl.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts to end with.")],
    opening: Annotated[
        Optional[list[str]], typer.Option(help="What prompts begin with, in rotation; can be given several times.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=1, help="Of a prompt, after its opening.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a prompt, after its opening.")] = 256,
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled target.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers; 0 is greedy decoding.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of each answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts written or answered together.")] = 8,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="auto (bundled target: bfloat16), bfloat16, float16 or float32.")
    ] = "auto",
    chat_template_kwargs: Annotated[
        Optional[str], typer.Option(help="JSON object for the chat template, such as '{\"enable_thinking\": false}'.")
    ] = None,
) -> None:
    """Let the target write prompts itself and answer them: no data set is needed."""
    from .data import run_synthesize

    run_synthesize(
        output,
        count=count,
        openings=opening,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        target=target,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype,
        chat_template_kwargs=chat_template_kwargs,
    )


@data.command()
def cache(
    responses: Annotated[Path, typer.Argument(help="JSONL of `prompt_ids` and the target's own `response_ids`.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; an interrupted run resumes.")],
    target_layers: Annotated[
        Optional[str], typer.Option(help="Layers that feed the drafter, such as 1,8,15,22,28; default: five, spread.")
    ] = None,
    target: Annotated[Optional[str], typer.Option(help="Folder or Hub id; default: the bundled target.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (bundled target: bfloat16), bfloat16, float16 or float32.")
    ] = "auto",
    bits: Annotated[int, typer.Option(help="16 stores the target's dtype, 8 half as much.")] = 16,
) -> None:
    """Store the features of the target that training reads."""
    from .data import run_cache

    run_cache(responses, output, target_layers=target_layers, target=target, dtype=dtype, bits=bits)


@app.command()
def env() -> None:
    """Versions and device, for bug reports."""
    from .env import run

    run()


def main() -> None:
    """Runs the command line; a known mistake is one line on stderr and exit status 1, without a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        message = " ".join(line.strip() for line in str(error).splitlines())  # transformers' own span several lines
        typer.secho(f"hf-dspark: {message}", fg=typer.colors.RED, err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.secho("hf-dspark: stopped.", err=True)
        sys.exit(130)
