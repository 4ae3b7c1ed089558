"""Datasets of made text, one for each common task, in the file formats that training scripts read."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from made.text import WORDS, sentence, sentences

_ENTITY_TAGS = ("O", "B-PER", "I-PER", "B-LOC")


def save_data(folder: Path, *, num_train: int = 96, num_validation: int = 16, seed: int = 0) -> Path:
    """Write NAME_train and NAME_validation files of every task into a folder, and return it.

    The tasks: text.txt for language models, pairs.csv (two sentences and whether they share a word),
    entities.json (tokens and their tags), answers.json (as SQuAD has them), summaries.json,
    translations.json, endings.csv (as SWAG has them), turns.json (prompt and completion), preferences.json,
    judged.json (as TRL has them), instructions.json (as Alpaca has them), chats.json (FastChat).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, number, add in (("train", num_train, 1), ("validation", num_validation, 2)):
        chance = random.Random(f"{seed} {add}")
        text = "\n".join(sentences(number * 2, seed=seed + add))
        (folder / f"text_{split}.txt").write_text(text + "\n", encoding="utf-8")
        for name, (sample, write) in _TASKS.items():
            stem, ending = name.split(".")
            write(folder / f"{stem}_{split}.{ending}", [sample(chance, index) for index in range(number)])
    return folder


def _pair(chance: random.Random, index: int) -> dict[str, Any]:
    first = sentence(chance)
    second = sentence(chance)
    shared = set(first.lower().strip(".").split()) & set(second.lower().strip(".").split())
    return {"sentence1": first, "sentence2": second, "label": int(bool(shared)), "idx": index}


def _entities(chance: random.Random, index: int) -> dict[str, Any]:
    tokens = sentence(chance).split()
    return {"id": str(index), "tokens": tokens, "ner_tags": [chance.choice(_ENTITY_TAGS) for _ in tokens]}


def _answer(chance: random.Random, index: int) -> dict[str, Any]:
    context = " ".join(sentence(chance) for _ in range(chance.randint(1, 4)))
    words = context.split()
    at = chance.randrange(len(words) - 2)
    start = len(" ".join(words[:at])) + (1 if at else 0)
    text = " ".join(words[at : at + 2])
    return {
        "id": f"question{index}",
        "title": f"page {index // 4}",
        "context": context,
        "question": sentence(chance, most=8).replace(".", "?"),
        "answers": {"text": [text], "answer_start": [start]},
    }


def _summary(chance: random.Random, index: int) -> dict[str, Any]:
    text = " ".join(sentence(chance) for _ in range(chance.randint(2, 4)))
    return {"text": text, "summary": " ".join(text.split()[:: chance.randint(4, 8)]), "id": index}


def _translation(chance: random.Random, index: int) -> dict[str, Any]:
    words = sentence(chance).strip(".").lower().split()
    return {"translation": {"en": " ".join(words), "ro": " ".join(word[::-1] for word in words)}}


def _endings(chance: random.Random, index: int) -> dict[str, Any]:
    first, second = sentence(chance), chance.choice(WORDS).capitalize()
    endings = {f"ending{number}": sentence(chance, most=12) for number in range(4)}
    return {
        "video-id": f"video{index}",
        "fold-ind": index,
        "startphrase": f"{first} {second}",
        "sent1": first,
        "sent2": second,
        "gold-source": "gold",
        **endings,
        "label": chance.randrange(4),
    }


def _turn(chance: random.Random, index: int) -> dict[str, Any]:
    return {"prompt": sentence(chance, most=10), "completion": " " + sentence(chance, most=20)}


def _preference(chance: random.Random, index: int) -> dict[str, Any]:
    chosen, rejected = (" " + sentence(chance, most=20) for _ in range(2))
    return {"prompt": sentence(chance, most=10), "chosen": chosen, "rejected": rejected}


def _judged(chance: random.Random, index: int) -> dict[str, Any]:
    return {**_turn(chance, index), "label": index % 2 == 0}


def _instruction(chance: random.Random, index: int) -> dict[str, Any]:
    return {"instruction": sentence(chance, most=10), "input": "", "output": sentence(chance, most=20)}


def _chat(chance: random.Random, index: int) -> dict[str, Any]:
    turns = [{"from": who, "value": sentence(chance, most=12)} for who in ("human", "gpt") * 2]
    return {"id": str(index), "conversations": turns}


def _write_csv(path: Path, rows: list[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_list(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text(json.dumps(list(rows)), encoding="utf-8")


def _write_squad(path: Path, rows: list[Mapping[str, Any]]) -> None:
    path.write_text(json.dumps({"data": rows}), encoding="utf-8")


_TASKS: dict[str, tuple[Callable[[random.Random, int], dict[str, Any]], Callable[[Path, Any], None]]] = {
    "pairs.csv": (_pair, _write_csv),
    "entities.json": (_entities, _write_lines),
    "answers.json": (_answer, _write_squad),
    "summaries.json": (_summary, _write_lines),
    "translations.json": (_translation, _write_lines),
    "endings.csv": (_endings, _write_csv),
    "turns.json": (_turn, _write_lines),
    "preferences.json": (_preference, _write_lines),
    "judged.json": (_judged, _write_lines),
    "instructions.json": (_instruction, _write_lines),
    "chats.json": (_chat, _write_list),
}
