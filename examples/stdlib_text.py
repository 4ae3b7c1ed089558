"""Prepares what both examples train on: the source of Python's library as tokens, and an untrained model."""

import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

END_OF_FILE = "<eos>"


class TokenBlocks(Dataset):
    """Blocks of equal length, each its own labels: the model shifts them by one token."""

    def __init__(self, file: Path, max_samples: int | None = None) -> None:
        self.blocks = torch.load(file)[:max_samples]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def prepare_text(
    data_dir: Path, *, vocab_size: int, sequence_length: int, max_train_files: int | None = None
) -> Path:
    """Returns a folder with a byte-pair tokenizer, `train.pt` and `eval.pt`; the first caller fills it.

    Args:
        data_dir: the cache, shared by runs and by the ranks of a run.
        vocab_size: of the tokenizer, which is trained here.
        sequence_length: tokens in a block.
        max_train_files: train on the first so many source files only; None for all.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    num_files = max_train_files or "all"
    folder = data_dir / f"python{version}-files_{num_files}-vocab{vocab_size}-length{sequence_length}"

    def write(unfinished: Path) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [file.read_text(encoding="utf-8", errors="replace") + END_OF_FILE for file in files]
        train_texts = [text for index, text in enumerate(texts) if index % 10][:max_train_files]
        eval_texts = texts[::10]
        tokenizer = _train_tokenizer(train_texts, vocab_size)
        tokenizer.save_pretrained(unfinished)
        torch.save(_blocks(tokenizer, train_texts, sequence_length), unfinished / "train.pt")
        torch.save(_blocks(tokenizer, eval_texts, sequence_length), unfinished / "eval.pt")

    _write_once(folder, write)
    return folder


def prepare_model(
    data_dir: Path, *, vocab_size: int, sequence_length: int, hidden_size: int, num_layers: int, seed: int
) -> Path:
    """Returns the folder of an untrained model, which ranks load as they would load a pretrained one.

    `AutoModelForCausalLM.from_config` on every rank would train as well, but from other weights: where ZeRO-3
    partitions the model while it is being built, the same seed draws others than in one process.
    """
    folder = data_dir / (
        f"untrained-vocab{vocab_size}-length{sequence_length}-hidden{hidden_size}-layers{num_layers}-seed{seed}"
    )

    def write(unfinished: Path) -> None:
        set_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 8 // 3,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 64,
            max_position_embeddings=sequence_length,
            tie_word_embeddings=True,
            initializer_range=0.05,  # from 0.02, the default, a model as narrow as this one learns slowly
        )
        LlamaForCausalLM(config).save_pretrained(unfinished)

    _write_once(folder, write)
    return folder


def _train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    byte_pair = Tokenizer(models.BPE())
    byte_pair.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pair.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_FILE],
        show_progress=False,
    )
    byte_pair.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=byte_pair, eos_token=END_OF_FILE, pad_token=END_OF_FILE)


def _blocks(tokenizer: PreTrainedTokenizerFast, texts: list[str], sequence_length: int) -> torch.Tensor:
    """Joins the tokens of all texts and cuts them into rows of equal length; the rest is dropped."""
    tokens = torch.cat([torch.tensor(token_ids) for token_ids in tokenizer(texts)["input_ids"]])
    num_blocks = len(tokens) // sequence_length
    return tokens[: num_blocks * sequence_length].clone().view(num_blocks, sequence_length)


def _write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Fills a folder whole or not at all: a crash leaves no half of it, and a second run reads none."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        unfinished = temporary / folder.name
        unfinished.mkdir()
        write(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # where it exists, another run was quicker and its content is the same
                raise
    finally:
        shutil.rmtree(temporary)
