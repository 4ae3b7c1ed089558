"""Trains a small language model on the source of Python's library, with the Trainer of transformers.

accelerate launch examples/train_trainer.py --output_dir out --max_steps 200
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from stdlib_text import TokenBlocks, prepare_model, prepare_text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    data_dir: str | None = field(default=None, metadata={"help": "Cache (default: OUTPUT_DIR/data)."})
    max_train_files: int | None = field(
        default=None, metadata={"help": "Train on the first so many files only."}
    )
    max_eval_samples: int = 128
    vocab_size: int = 2048
    sequence_length: int = 128


@dataclass
class ModelArguments:
    hidden_size: int = field(default=192, metadata={"help": "A multiple of 64."})
    num_layers: int = 2


def parse_args() -> tuple[DataArguments, ModelArguments, TrainingArguments]:
    parser = HfArgumentParser((DataArguments, ModelArguments, TrainingArguments), description=__doc__)
    parser.set_defaults(
        output_dir="trainer_output",
        max_steps=200,
        learning_rate=5e-3,
        weight_decay=0.1,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=10,
        dataloader_drop_last=True,
        report_to="none",
    )
    data_args, model_args, training_args = parser.parse_args_into_dataclasses()
    data_args.data_dir = data_args.data_dir or str(Path(training_args.output_dir) / "data")
    return data_args, model_args, training_args


def main() -> None:
    data_args, model_args, training_args = parse_args()
    data_dir = Path(data_args.data_dir)
    sizes = {"vocab_size": data_args.vocab_size, "sequence_length": data_args.sequence_length}
    with training_args.main_process_first(desc="preparation of the text and the untrained model"):
        text_dir = prepare_text(data_dir, **sizes, max_train_files=data_args.max_train_files)
        untrained_dir = prepare_model(
            data_dir,
            **sizes,
            hidden_size=model_args.hidden_size,
            num_layers=model_args.num_layers,
            seed=training_args.seed,
        )
    set_seed(training_args.seed)

    trainer = Trainer(
        # After TrainingArguments, which know of ZeRO-3: the model is then partitioned while it is loaded.
        model=AutoModelForCausalLM.from_pretrained(untrained_dir),
        args=training_args,
        train_dataset=TokenBlocks(text_dir / "train.pt"),
        eval_dataset=TokenBlocks(text_dir / "eval.pt", data_args.max_eval_samples),
        data_collator=default_data_collator,
        processing_class=AutoTokenizer.from_pretrained(text_dir),
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)

    eval_metrics = trainer.evaluate()
    eval_metrics["perplexity"] = math.exp(eval_metrics["eval_loss"])
    trainer.log_metrics("eval", eval_metrics)
    trainer.save_metrics("eval", eval_metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
