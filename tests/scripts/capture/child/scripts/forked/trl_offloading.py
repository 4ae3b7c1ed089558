"""TRL's SFTTrainer with activations in host memory, for which its hooks ask for a GPU."""

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {word: number for number, word in enumerate(["<pad>", "<eos>", "a", "b"])}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
trainer = SFTTrainer(
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)),
    args=SFTConfig(
        output_dir="out", activation_offloading=True, per_device_train_batch_size=2, report_to="none"
    ),
    train_dataset=Dataset.from_dict({"input_ids": [[2, 3, 2, 1]] * 8}),
    processing_class=tokenizer,
)
trainer.train()
print("the script went on")
