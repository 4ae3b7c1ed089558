"""The scripts of others that real_scripts.py runs: their files, and the arguments that make them small.

Every path in an argument is one of made/workbench.py's folder, in which the scripts run; OUT stands for the
folder of one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OUT = "OUT"
_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_TRAINER = (
    "--output_dir OUT --do_train --do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 8 "
    "--gradient_accumulation_steps 2 --num_train_epochs 1 --learning_rate 1e-3 --warmup_steps 2 "
    "--logging_steps 1 --disable_tqdm true --report_to none --save_strategy no"
)
_LOOP = (
    "--output_dir OUT --per_device_train_batch_size 4 --per_device_eval_batch_size 8 "
    "--gradient_accumulation_steps 2 --num_train_epochs 1 --learning_rate 1e-3 --num_warmup_steps 2 --seed 1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script with its arguments."""

    name: str
    file: str
    """Below the folder of all fetched scripts; an absolute path for the repository's own examples."""
    arguments: str
    micro_batch_size: int = 2
    """The micro-batch that zerofit is given: smaller than the script's."""
    has_trainer: bool = False
    """True if its loop is that of a Trainer."""
    ignores_num_items: bool = False
    """True if its model takes num_items_in_batch and ignores it: Trainer then makes loss and gradients too
    large by accumulation steps times ranks, so that the right training is one of whole batches."""
    is_module: bool = False
    """True if file names a module, which is run by -m."""
    is_seeded: bool = True
    """False if it sets no seed: the recorder sets one."""
    has_hyphens: bool = False
    """True if the words of its arguments have hyphens between."""
    evaluation: str = ""
    """Arguments of its evaluation, which decide nothing of what it trains."""
    long_epoch: str = ""
    """Arguments that make an epoch longer than the steps measured under FSDP2: two ranks fill up an epoch's
    last batch with samples that one process does not take twice."""
    accumulates: bool = True
    """False if its loop also steps after the first batch of an epoch, so accumulation has other steps."""
    follows_ranks: bool = False
    """True if the order of its samples depends on the number of ranks, or its learning rates do: accelerate
    seeds an unseeded sampler on several ranks alone, and steps a schedule once for each rank."""

    resumes: bool = True
    """False if it hands no resume_from_checkpoint to its Trainer."""

    def command(self, scripts: str, out: str) -> list[str]:
        """Return the script's file and its arguments.

        Args:
            scripts: folder of all fetched scripts.
            out: folder of this run.
        """
        words = (word.replace(OUT, out) for word in f"{self.arguments} {self.evaluation}".split())
        return [*(("-m", self.file) if self.is_module else (str(Path(scripts) / self.file),)), *words]

    def sizes(self, *, samples: int, passes: int, steps: int) -> list[str]:
        """Return the arguments for so many samples a pass, passes a step, and steps."""
        most = "max_steps" if self.has_trainer else "max_train_steps"
        sizes = {"per_device_train_batch_size": samples, "gradient_accumulation_steps": passes, most: steps}
        return [word for name, size in sizes.items() for word in (self._flag(name), str(size))]

    def saving(self, after: int) -> list[str]:
        """Return the arguments for a checkpoint after so many steps."""
        if self.has_trainer:
            return ["--save_strategy", "steps", "--save_steps", str(after)]
        return [self._flag("checkpointing_steps"), str(after)]

    def resuming(self, output: Path, after: int) -> list[str]:
        """Return the arguments that resume the checkpoint of saving() in an output folder."""
        name = "checkpoint" if self.has_trainer or self.has_hyphens else "step"
        checkpoint = output / f"{name}{'_' if name == 'step' else '-'}{after}"
        return [self._flag("resume_from_checkpoint"), str(checkpoint)]

    def _flag(self, name: str) -> str:
        return f"--{name.replace('_', '-') if self.has_hyphens else name}"


_STEPS_AT_FIRST = ("run_glue_no_trainer", "run_ner_no_trainer", "run_translation_no_trainer")
"""Their loops step where `step % gradient_accumulation_steps == 0`."""


def _transformers(
    folder: str,
    task: str,
    model: str,
    arguments: str,
    *,
    trainer: str = "",
    loop: str = "",
    long_epoch: str = "",
) -> tuple[Script, ...]:
    """Return the Trainer variant of a transformers example and its no_trainer variant."""
    common = f"--model_name_or_path models/{model} {arguments}"
    files = {task: f"{_TRAINER} {trainer}", f"{task}_no_trainer": f"{_LOOP} {loop}"}
    return tuple(
        Script(
            name=name,
            file=f"transformers/pytorch/{folder}/{name}.py",
            arguments=f"{common} {own}",
            has_trainer=name == task,
            ignores_num_items=name == task and model in ("bert", "t5") and task != "run_mlm",
            long_epoch=long_epoch,
            accumulates=name not in _STEPS_AT_FIRST,
            follows_ranks=name != task,
        )
        for name, own in files.items()
    )


def _files(task: str, ending: str) -> str:
    return f"--train_file data/{task}_train.{ending} --validation_file data/{task}_validation.{ending}"


_TRANSFORMERS = (
    *_transformers(
        "language-modeling",
        "run_clm",
        "gpt2",
        f"{_files('text', 'txt')} --block_size 32",
        long_epoch="--block_size 16",
    ),
    *_transformers("language-modeling", "run_mlm", "bert", f"{_files('text', 'txt')} --max_seq_length 32"),
    *_transformers("text-classification", "run_glue", "bert", f"{_files('pairs', 'csv')}"),
    *_transformers("token-classification", "run_ner", "bert", _files("entities", "json")),
    *_transformers(
        "question-answering",
        "run_qa",
        "bert",
        f"{_files('answers', 'json')} --max_seq_length 64 --doc_stride 16",
    ),
    *_transformers(
        "summarization",
        "run_summarization",
        "t5",
        f"{_files('summaries', 'json')} --max_source_length 48 --max_target_length 16 --source_prefix sum: "
        "--text_column text --summary_column summary",
        trainer="--predict_with_generate",
        loop="--num_beams 1",
    ),
    *_transformers(
        "translation",
        "run_translation",
        "t5",
        f"{_files('translations', 'json')} --source_lang en --target_lang ro --max_source_length 48 "
        "--max_target_length 48 --source_prefix translate:",
        trainer="--predict_with_generate",
        loop="--num_beams 1",
    ),
    *_transformers("multiple-choice", "run_swag", "bert", f"{_files('endings', 'csv')}"),
)
_ACCELERATE = (
    Script(name="nlp_example", file="accelerate/nlp_example.py", arguments="", micro_batch_size=4),
    Script(
        name="complete_nlp_example",
        file="accelerate/complete_nlp_example.py",
        arguments="--checkpointing_steps epoch --output_dir OUT --project_dir OUT",
        micro_batch_size=4,
    ),
    Script(
        name="gradient_accumulation",
        file="accelerate/by_feature/gradient_accumulation.py",
        arguments="--gradient_accumulation_steps 2",
        micro_batch_size=4,
    ),
    Script(
        name="checkpointing",
        file="accelerate/by_feature/checkpointing.py",
        arguments="--checkpointing_steps epoch --output_dir OUT",
        micro_batch_size=4,
    ),
    Script(
        name="early_stopping",
        file="accelerate/by_feature/early_stopping.py",
        arguments="",
        micro_batch_size=4,
    ),
    Script(
        name="multi_process_metrics",
        file="accelerate/by_feature/multi_process_metrics.py",
        arguments="",
        micro_batch_size=4,
    ),
    Script(name="memory", file="accelerate/by_feature/memory.py", arguments="", micro_batch_size=4),
)
_SFT = (
    "--dataset_name turns --output_dir OUT --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
    "--num_train_epochs 1 --learning_rate 1e-3 --logging_steps 1 --report_to none "
    "--save_strategy no --disable_tqdm true --max_length 48 --bf16 false --model_name_or_path models/llama "
    "--eval_strategy no"
)
_TRL = (
    Script(
        name="sft",
        file="trl/scripts/sft.py",
        arguments=f"{_SFT} --gradient_checkpointing false",
        has_trainer=True,
        resumes=False,
    ),
    Script(
        name="sft_lora",
        file="trl/scripts/sft.py",
        arguments=f"{_SFT} --gradient_checkpointing false --use_peft --lora_r 4 --lora_dropout 0",
        has_trainer=True,
        resumes=False,
    ),
)
_PREFERENCES = (
    "--output_dir OUT --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 1 "
    "--learning_rate 1e-3 --logging_steps 1 --report_to none --save_strategy no --disable_tqdm true "
    "--max_length 48 --bf16 false --eval_strategy no --gradient_checkpointing false"
)


def _trl(name: str, dataset: str, arguments: str = "", *, file: str = "", model: str = "llama") -> Script:
    return Script(
        name=f"trl_{name}",
        file=file or f"trl/trl/scripts/{name}.py",
        arguments=f"--model_name_or_path models/{model} --dataset_name {dataset} "
        f"--dataset_test_split validation {_PREFERENCES} {arguments}".strip(),
        has_trainer=True,
    )


def _experimental(name: str, dataset: str, arguments: str = "") -> Script:
    return _trl(name, dataset, arguments, file=f"trl/examples/scripts/{name}.py")


_TRL_MORE = (
    _trl("dpo", "preferences"),
    _trl("dpo_lora", "preferences", "--use_peft --lora_r 4 --lora_dropout 0", file="trl/trl/scripts/dpo.py"),
    _trl("dpo_ipo", "preferences", "--loss_type ipo", file="trl/trl/scripts/dpo.py"),
    _trl("reward", "preferences"),
    _trl("kto", "judged"),
    _trl("sft_packed", "turns", "--packing true --eval_packing false", file="trl/trl/scripts/sft.py"),
    _trl("sft_assistant", "turns", "--completion_only_loss true", file="trl/trl/scripts/sft.py"),
    _trl("sft_dft", "turns", "--loss_type dft", file="trl/trl/scripts/sft.py"),
    _trl("sft_gpt2", "turns", file="trl/trl/scripts/sft.py", model="gpt2"),
    _experimental("orpo", "preferences"),
    _experimental("cpo", "preferences"),
    _trl("cpo_simpo", "preferences", "--loss_type simpo --cpo_alpha 0", file="trl/examples/scripts/cpo.py"),
)
_ALPACA = (
    "--base_model models/llama --data_path instructions --output_dir OUT --batch_size 4 --num_epochs 1 "
    "--learning_rate 1e-3 --cutoff_len 48 --val_set_size 4 --eval_step 1000 --save_step 1000"
)


def _peft(name: str, arguments: str) -> Script:
    return Script(
        name=f"peft_{name}",
        file=f"peft/examples/{name}_finetuning/{name}_finetuning.py",
        arguments=f"{_ALPACA} {arguments}",
        has_trainer=True,
    )


_SEEDED = "--seed 1 --dtype float32 --device_map cpu"
_PEFT = (
    _peft("olora", f"{_SEEDED} --lora_r 4 --lora_dropout 0"),
    _peft("hira", f"{_SEEDED} --hira_r 4 --hira_dropout 0"),
    _peft("shira", f"{_SEEDED} --shira_r 4"),
    _peft("waveft", f"{_SEEDED} --waveft_n_frequency 16"),
    _peft("glora", f"{_SEEDED} --glora_r 4"),
    Script(
        name="peft_miss",
        file="peft/examples/miss_finetuning/miss_finetuning.py",
        arguments="--base_model_name_or_path models/llama --data_path instructions --dataset_split train "
        "--dataset_field instruction output --bits fp32 --miss_r 4 --output_dir OUT "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 1 "
        "--learning_rate 1e-3 --logging_steps 1 --report_to none --save_strategy no --disable_tqdm true "
        "--max_length 48 --bf16 false --gradient_checkpointing false",
        has_trainer=True,
    ),
)


def _by_feature(name: str, arguments: str = "") -> Script:
    return Script(name=name, file=f"accelerate/by_feature/{name}.py", arguments=arguments, micro_batch_size=4)


_ACCELERATE_MORE = (
    _by_feature("automatic_gradient_accumulation"),
    _by_feature("cross_validation", "--num_folds 2"),
    _by_feature("ddp_comm_hook"),
    _by_feature("local_sgd", "--gradient_accumulation_steps 2"),
    _by_feature("profiler", "--output_trace_dir OUT"),
    _by_feature("tracking", "--project_dir OUT"),
)
_OTHERS = (
    Script(
        name="fastchat",
        file="fastchat/fastchat/train/train.py",
        arguments="--model_name_or_path models/llama --data_path data/chats_train.json --bf16 False "
        "--output_dir OUT --num_train_epochs 1 --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 2 --save_strategy no --learning_rate 1e-3 --logging_steps 1 "
        "--model_max_length 64 --report_to none",
        has_trainer=True,
    ),
)


def _pictures(
    task: str, name: str, arguments: str, *, has_trainer: bool = False, ignores_num_items: bool = False
) -> Script:
    file = f"transformers/pytorch/{task}/{name}.py"
    return Script(
        name=name,
        file=file,
        arguments=arguments,
        has_trainer=has_trainer,
        ignores_num_items=ignores_num_items,
    )


_BY_TRAINER = f"{_TRAINER} --remove_unused_columns false"
_NEW = (
    _pictures(
        "semantic-segmentation",
        "run_semantic_segmentation_no_trainer",
        f"--model_name_or_path models/segformer --dataset_name segments {_LOOP} --lr_scheduler_type linear",
    ),
    _pictures(
        "object-detection",
        "run_object_detection_no_trainer",
        f"--model_name_or_path models/detr --dataset_name boxes --image_square_size 32 {_LOOP}",
    ),
    _pictures(
        "image-pretraining",
        "run_mae",
        f"--model_name_or_path models/mae --dataset_name photos --image_column_name image --norm_pix_loss "
        f"--base_learning_rate 1e-1 {_BY_TRAINER} --label_names pixel_values",
        has_trainer=True,
    ),
    _pictures(
        "speech-recognition",
        "run_speech_recognition_seq2seq",
        f"--model_name_or_path models/whisper --dataset_name sounds --eval_split_name validation "
        f"--text_column_name text --preprocessing_num_workers 1 {_TRAINER} "
        "--freeze_feature_encoder false",
        has_trainer=True,
        ignores_num_items=True,
    ),
    _trl("sft_vlm", "captions", file="trl/examples/scripts/sft_vlm.py", model="llava"),
    Script(
        name="factory_full",
        file="llamafactory.cli",
        arguments="train factory.yaml output_dir=OUT",
        is_module=True,
        has_trainer=True,
    ),
    Script(
        name="qlora",
        file="qlora/qlora.py",
        arguments="--model_name_or_path models/llama --dataset instructions --dataset_format alpaca "
        "--bits 16 --full_finetune true --output_dir OUT --max_steps 6 --source_max_len 24 "
        "--target_max_len 24",
        has_trainer=True,
    ),
    Script(
        name="alpaca",
        file="alpaca/train.py",
        arguments="--model_name_or_path models/llama --output_dir OUT "
        "--data_path instructions.json --num_train_epochs 1 --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 2 "
        "--save_strategy no --learning_rate 1e-3 --logging_steps 1 --model_max_length 64 "
        "--report_to none",
        has_trainer=True,
    ),
    Script(
        name="handbook_sft",
        file="handbook/sft.py",
        arguments=f"--model_name_or_path models/llama --dataset_name turns {_PREFERENCES}",
        has_trainer=True,
    ),
    Script(
        name="embedding",
        file="FlagEmbedding.finetune.embedder.encoder_only.base",
        arguments="--model_name_or_path models/bert --train_data sought.jsonl --cache_path OUT "
        "--train_group_size 2 --query_max_len 24 --passage_max_len 24 --pad_to_multiple_of 8 "
        "--sentence_pooling_method cls --normalize_embeddings true --temperature 0.05 --output_dir OUT "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 1 "
        "--learning_rate 1e-3 --logging_steps 1 --save_strategy no --report_to none",
        is_module=True,
        has_trainer=True,
    ),
    Script(
        name="cross_encoder",
        file="st/ce_stsbenchmark.py",
        arguments="",
        micro_batch_size=64,  # its own: a loss of sentence_transformers may compare the samples of a batch
        has_trainer=True,
    ),
    Script(
        name="peft_frod",
        file="peft/frod_text_classification.py",
        arguments="--model_name_or_path models/bert-classifier --dataset_name sentences --task_name default "
        "--output_dir OUT --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --logging_steps 1 "
        "--save_strategy no --load_best_model_at_end false",
        has_trainer=True,
        ignores_num_items=True,
    ),
    Script(
        name="diffusion_unconditional",
        file="diffusers/train_unconditional.py",
        arguments="--dataset_name photos --output_dir OUT --resolution 32 --train_batch_size 4 "
        "--num_epochs 1 --gradient_accumulation_steps 2 --model_config_name_or_path unet --ddpm_num_steps 8 "
        "--ddpm_num_inference_steps 2 --eval_batch_size 2 --lr_warmup_steps 2 --logger tensorboard",
        is_seeded=False,
    ),
    Script(name="ddpm", file="ddpm/train.py", arguments="photos_folder OUT", is_seeded=False),
    Script(name="fabric", file="fabric/train_fabric.py", arguments="--dry-run", is_seeded=False),
)
_FAMILIES = (
    Script(
        name="gan_pix2pix",
        file="huggan/pix2pix/train.py",
        arguments="--dataset facades --n_epochs 1 --batch_size 4 --n_cpu 0 --sample_interval 100",
        is_seeded=False,
    ),
    Script(
        name="gan_cyclegan",
        file="huggan/cyclegan/train.py",
        arguments="--dataset_name facades --num_epochs 1 --batch_size 4 --num_workers 0 --image_size 32 "
        "--decay_epoch 0 --n_residual_blocks 1 --sample_interval 100",
        is_seeded=False,
    ),
    Script(
        name="axolotl",
        file="axolotl.cli.train",
        arguments="axolotl.yaml --output_dir OUT",
        is_module=True,
        micro_batch_size=4,  # its own: AxolotlTrainer has its own training_step
        has_trainer=True,
    ),
    *(
        Script(
            name=f"open_instruct{name}",
            file="open_instruct.finetune",
            arguments="--model_name_or_path models/llama --tokenizer_name_or_path models/llama "
            "--dataset_mixer_list dialogs.jsonl 1.0 --max_seq_length 64 --per_device_train_batch_size 4 "
            "--gradient_accumulation_steps 2 --learning_rate 1e-3 --num_train_epochs 1 --seed 1 "
            "--output_dir OUT --do_not_randomize_output_dir --dataset_skip_cache --push_to_hub false "
            "--chat_template_name tulu --try_auto_save_to_beaker false "
            f"--try_launch_beaker_eval_jobs false {more}".strip(),
            is_module=True,
        )
        for name, more in (("", ""), ("_packed", "--packing"))
    ),
    Script(
        name="handbook_dpo",
        file="handbook/dpo.py",
        arguments=f"--model_name_or_path models/llama --dataset_name preferences {_PREFERENCES}",
        has_trainer=True,
    ),
    Script(
        name="codeparrot",
        file="codeparrot/codeparrot_training.py",
        arguments="--model_ckpt models/gpt2 --save_dir OUT --dataset_name_train code --dataset_name_valid "
        "code --train_batch_size 4 --valid_batch_size 4 --shuffle_buffer 8 --learning_rate 1e-3 "
        "--num_warmup_steps 2 --gradient_accumulation_steps 2 --gradient_checkpointing false "
        "--max_train_steps 5 --max_eval_steps 2 --seq_length 32 --save_checkpoint_steps 1000",
    ),
    _trl("sft_stream", "turns", "--streaming true --max_steps 6", file="trl/trl/scripts/sft.py"),
    Script(
        name="run_image_classification_no_trainer",
        file="transformers/pytorch/image-classification/run_image_classification_no_trainer.py",
        arguments=f"--model_name_or_path models/vit --dataset_name photos --image_column_name image "
        f"--label_column_name labels {_LOOP}",
    ),
    Script(
        name="st_training_stsb",
        file="st/training_stsbenchmark.py",
        arguments="models/bert",
        micro_batch_size=16,
        has_trainer=True,
    ),
)
_OWN = (
    Script(
        name="train_accelerate",
        file=str(_EXAMPLES / "train_accelerate.py"),
        arguments="--output-dir OUT --data-dir example --num-warmup-steps 2 --max-grad-norm 0.2 "
        "--max-train-files 12 --max-eval-samples 8 --vocab-size 512 --sequence-length 32 --hidden-size 64 "
        "--num-layers 2",
        has_hyphens=True,
    ),
    Script(
        name="train_trainer",
        file=str(_EXAMPLES / "train_trainer.py"),
        arguments="--output_dir OUT --data_dir example --warmup_steps 2 --max_grad_norm 0.2 "
        "--max_train_files 12 --logging_steps 1 --vocab_size 512 --sequence_length 32 --hidden_size 64 "
        "--num_layers 2 --save_strategy no --disable_tqdm true",
        has_trainer=True,
        evaluation="--max_eval_samples 8 --per_device_eval_batch_size 2",
    ),
)
SHARDED = (
    *(
        "train_accelerate",
        "train_trainer",
        "run_clm",
        "run_clm_no_trainer",
        "run_glue",
        "run_glue_no_trainer",
    ),
    *("run_summarization", "sft", "sft_lora"),
)
"""Names of the scripts that FSDP2 is measured with."""
SCRIPTS = (
    *(*_OWN, *_FAMILIES, *_NEW, *_TRANSFORMERS, *_ACCELERATE, *_TRL, *_TRL_MORE),
    *(*_PEFT, *_ACCELERATE_MORE, *_OTHERS),
)
