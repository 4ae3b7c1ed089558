"""A Trainer that trains adapters of peft in a language model, with dynamic padding."""

from peft import LoraConfig, get_peft_model
from plain_loop import collate, make_samples
from results import write_steps
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


def main():
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training.seed)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    trainer = Trainer(
        get_peft_model(GPT2LMHeadModel(config), lora),
        training,
        train_dataset=make_samples(40, 1),
        eval_dataset=make_samples(12, 2),
        data_collator=collate,
    )
    trainer.train()
    metrics = trainer.evaluate()
    write_steps(trainer, evaluations=[metrics["eval_loss"]])


if __name__ == "__main__":
    main()
