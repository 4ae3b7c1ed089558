"""What check says of launch lines in shell scripts and notebooks, of other programs, and of recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerofit.checking.check_run import check
from zerofit.checking.report import Report
from zerofit.checking.targets import is_fixable

_PARSER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--out")
parser.parse_args()
"""
_TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=None, args=args, train_dataset=None).train()
"""
_DEEPSPEED = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with three scripts and a DeepSpeed file, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    Path("train.py").write_text(_PARSER)
    Path("sft.py").write_text(_TRAINER)
    Path("dpo.py").write_text(_TRAINER.replace("HfArgumentParser", "TrlParser"))
    Path("ds.json").write_text(json.dumps(_DEEPSPEED))
    return tmp_path


def _check(text: str, name: str = "run.sh") -> Report:
    Path(name).write_text(text)
    return check(name)


def _told(report: Report) -> list[str]:
    return [f"{finding.place} {finding.rule}: {finding.found}" for finding in report.findings]


_FAULTS = [
    (
        "accelerate launch --num_processes --multi_gpu \\\n  train.py --lr 1\n",
        ["run.sh:1 launch-flag-without-value: --num_processes"],
    ),
    (
        "N=4\ntorchrun --nproc_per_node $N \\\n  --nnodes x \\\n  train.py\n",
        ["run.sh:3 launch-flag-value: --nnodes x"],
    ),
    (
        "FLAGS='--num_gpus 2 --zero 3'\ndeepspeed --no_local_rank $FLAGS train.py\n",
        ["run.sh:2 launch-unknown-flag: --zero 3"],
    ),
    (
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun --nodes 2 bash -c 'torchrun --nnodes 2 train.py --lrr 1'\n",
        ["run.sh:3 script-argument-unknown: --lrr"],
    ),
    (
        "P=bf61\nuv run accelerate launch --mixed_precision $P train.py\n",
        ["run.sh:2 launch-flag-value: --mixed_precision bf61"],
    ),
    (
        "accelerate launch train.py --lr 1\n"
        "accelerate launch \\\n  --mixed_precision ${P:-bf8} \\\n  train.py --rl 2\n",
        [
            "run.sh:3 launch-flag-value: --mixed_precision bf8",
            "run.sh:4 script-argument-unknown: --rl",
        ],
    ),
    (
        "torchrun sft.py \\\n  --deepspeed ds.json \\\n  --per_device_train_batch_size 8\n",
        [
            "ds.json:1 trainer-values-differ: train_micro_batch_size_per_gpu=4 with "
            "--per_device_train_batch_size 8"
        ],
    ),
    (
        'cat > made.json <<EOF\n{"zero_optimization": {"stge": 3}, "train_batch_size": 8}\nEOF\n'
        "torchrun sft.py --deepspeed made.json\n",
        ["made.json:1 deepspeed-key-rejected: zero_optimization.stge=3"],
    ),
    (
        "accelerate launch --num_processes 2 \\ \n  train.py \\\n  --lr 1\n",
        ["run.sh:1 launch-line-broken: train.py --lr 1 is lost"],
    ),
    (
        "llamafactory-cli train \\\n  --stage sft\n  --bf16 true --fp16 true\n",
        [
            "run.sh:2 launch-line-broken: --bf16 true --fp16 true is lost",
            "run.sh:3 trainer-takes-one-half-precision: --bf16 true with --fp16 true",
        ],
    ),
    (
        "torchrun sft.py --deepspeed none.json\n",
        ["run.sh:1 named-file-missing: --deepspeed none.json"],
    ),
]


@pytest.mark.parametrize(("text", "expected"), _FAULTS)
def test_a_fault_is_shown_at_its_line(text: str, expected: list[str]) -> None:
    assert _told(_check(text)) == expected


_GOOD = [
    "torchrun --nproc_per_node 2 train.py --lr 1 --out a\n",
    'ARGS="--lr ${LR:-1e-4} $EXTRA"\nif [ $1 ]; then\n  accelerate launch $FLAGS train.py $ARGS\nfi\n',
    "GPUS=$(nvidia-smi -L | wc -l)\ntorchrun --nproc_per_node $GPUS --master_port=$((2 + RANDOM)) train.py\n",
    'accelerate launch --config_file $CONFIG --zero_stage 3 train.py "$@"\n',
    "conda install -y deepspeed accelerate\npip install torchrun\ndeepspeed --version\npython -m pip list\n",
    "conda run -n deepspeed python train.py --lr 1\ndocker run --rm --name torchrun image sleep 1\n",
    "cd $HOME/elsewhere\naccelerate launch finetune.py --anything 1 --config_file x.yaml\n",
    "sed s/X/3/ t.json > made.json\ntorchrun sft.py --deepspeed made.json --bf16\n",
    "torchrun sft.py --deepspeed ds_$STAGE.json ${EXTRA[@]}\n",
    'cat > a.json <<EOF\n{"zero_optimization": {"stage": $STAGE}}\nEOF\ntorchrun sft.py --deepspeed a.json\n',
    "cat > a.yaml <<EOF\ndistributed_type: DEEPSPEED\nnum_processes: $((N * 4))\nEOF\n"
    "accelerate launch --config_file a.yaml --zero_stage 3 train.py\n",
    "accelerate launch --config_file not_here.yaml --zero_stage 3 away.py\n",
    "swift sft --model m --deepspeed zero2 --overwrite_output_dir true\n",
    "echo deepspeed train.py --wrong\n# torchrun train.py --wrong\n",
    "# nothing\n",
]


@pytest.mark.parametrize("text", _GOOD)
def test_good_lines_and_those_that_are_not_known_are_no_findings(text: str) -> None:
    assert _told(_check(text)) == []


def test_a_script_is_found_in_the_folders_of_its_line(folder: Path) -> None:
    (folder / "repo" / "scripts").mkdir(parents=True)
    (folder / "repo" / "src").mkdir()
    (folder / "repo" / "src" / "fit.py").write_text(_PARSER)
    for number, text in enumerate(
        [
            "torchrun src/fit.py --wrong 1\n",
            "cd src\ntorchrun fit.py --wrong 1\n",
            "cd $(dirname $0)/..\ntorchrun src/fit.py --wrong 1\n",
            'HERE=$(cd $(dirname "$0") && pwd)\ntorchrun $HERE/../src/fit.py --wrong 1\n',
            "cd repo\n(cd src && torchrun fit.py --wrong 1)\n",
        ]
    ):
        report = _check(text, f"repo/scripts/run{number}.sh")
        assert [finding.found for finding in report.findings] == ["--wrong"], text


def test_lines_are_read_through_the_scripts_that_they_run() -> None:
    Path("job.sbatch").write_text("#!/bin/bash\nsrun torchrun --nnodes x train.py\n")
    for text in (
        "sbatch --nodes 2 job.sbatch\n",
        "bash job.sbatch 3\n",
        "for i in 1 2; do sbatch job.sbatch; done\n",
    ):
        assert _told(_check(text)) == ["job.sbatch:2 launch-flag-value: --nnodes x"]
    assert _told(check("sbatch", "--nodes", "2", "job.sbatch")) == [
        "job.sbatch:2 launch-flag-value: --nnodes x"
    ]
    assert _told(check("bash", "-c", "torchrun --nnodes x train.py"))[0].endswith("--nnodes x")


@pytest.mark.parametrize("shell", ["bash", "sh", "zsh", "dash", "ksh", "/usr/bin/ksh", "nohup ksh", "sbatch"])
def test_every_shell_runs_lines(shell: str) -> None:
    Path("run.ksh").write_text("torchrun --nnodes x train.py\n")
    told = ["run.ksh:1 launch-flag-value: --nnodes x"]
    assert _told(check(*shell.split(), "run.ksh")) == told
    assert _told(_check(f"{shell} run.ksh\n")) == told


@pytest.mark.parametrize("shell", ["bash", "sh", "zsh", "dash", "ksh"])
def test_every_shell_hands_on_a_text(shell: str) -> None:
    assert _told(check(shell, "-c", "torchrun --nnodes x train.py"))[0].endswith("--nnodes x")


def test_a_notebook() -> None:
    cells = ["%%writefile fit.py\n" + _PARSER, "!accelerate launch fit.py \\\n  --lr 1 \\\n  --nope 2\n"]
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    report = _check(json.dumps(notebook), "n.ipynb")
    assert _told(report) == ["n.ipynb, cell 2:3 script-argument-unknown: --nope"]
    with pytest.raises(ExceptionGroup, match="can't be checked"):
        _check("no JSON", "broken.ipynb")


def test_the_report_counts_lines_and_says_what_is_not_checked() -> None:
    report = _check(
        "torchrun train.py\ntorchrun away.py\ntune run --nproc_per_node 2 recipe\ntrl sft --bf16\n"
    )
    assert report.verdict.notes == (
        "run.sh:2: away.py, which is not found here",
        "run.sh:4: the flags of trl sft, a program that zerofit does not know",
    )
    assert (
        str(report).splitlines()[-1].startswith("ok: run.sh (3 launch lines), train.py (named by run.sh:1): ")
    )
    nothing = _check("make\n")
    assert nothing.verdict.notes == ("run.sh, which has no launch line",)
    assert str(nothing).splitlines()[-1] == "nothing to check: run.sh (0 launch lines)"


_RECIPES = {
    "llama_factory.yaml": (
        "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndeepspeed: ds.json\noutput_dir: o\n"
        "overwrite_output_dir: true\nper_device_train_batch_size: {}\nlearning_rate: 1e-4\n"
    ),
    "axolotl.yml": (
        "base_model: m\nsequence_len: 512\nmicro_batch_size: {}\ndeepspeed: ds.json\nbf16: auto\n"
        "optimizer: muon\ndatasets:\n  - path: d\nevaluation_strategy: steps\n"
    ),
    "trl.yaml": (
        "model_name_or_path: m\ndataset_name: d\ndeepspeed: ds.json\nper_device_train_batch_size: {}\n"
        "bf16: true\nlr_scheduler_type: cosine\n"
    ),
}
_LINES = [
    ("llamafactory-cli train llama_factory.yaml", "llama_factory.yaml"),
    ("uv run llamafactory-cli train llama_factory.yaml learning_rate=1e-5", "llama_factory.yaml"),
    ("axolotl train axolotl.yml --launcher torchrun", "axolotl.yml"),
    ("accelerate launch -m axolotl.cli.train axolotl.yml", "axolotl.yml"),
    ("trl sft --config trl.yaml", "trl.yaml"),
    ("accelerate launch --num_processes 2 dpo.py --config trl.yaml", "trl.yaml"),
    ("torchrun sft.py trl.yaml", "trl.yaml"),
    ("sft.py trl.yaml", "trl.yaml"),
    ("trl.yaml", "trl.yaml"),
    ("axolotl.yml", "axolotl.yml"),
]


@pytest.mark.parametrize(("line", "recipe"), _LINES)
def test_a_recipe_holds_training_arguments(line: str, recipe: str) -> None:
    Path(recipe).write_text(_RECIPES[recipe].format(8))
    (found,) = _told(check(*line.split()))
    assert found.startswith("ds.json:1 trainer-values-differ: train_micro_batch_size_per_gpu=4 with ")
    assert found.endswith("batch_size=8")
    Path(recipe).write_text(_RECIPES[recipe].format(4))
    assert _told(check(*line.split())) == []


def test_recipes_are_checked_one_by_one() -> None:
    for recipe, text in _RECIPES.items():
        Path(recipe).write_text(text.format(8 if recipe == "trl.yaml" else 4))
    assert [finding.found.rpartition(" with ")[2] for finding in check(*_RECIPES).findings] == [
        "per_device_train_batch_size=8"
    ]


_REFUSED = [
    ("llamafactory-cli version", "check does not know this program, and its line names no file to check"),
    ("accelerate test", "check does not know this program, and its line names no file to check"),
    (
        "tune run --nproc_per_node 2 full_finetune --config llama3/8B_full epochs=1",
        "does not know this program",
    ),
    ("axolotl fetch examples", "does not know this program"),
    ("acelerate launch --num_processes 2 train.py --lr 1 --out a", "does not know this program"),
    ("srun --nodes 2 my_trainer --lr 1 --bf16", "does not know this program"),
    ("mytool --a 1 --b 2 --c 3 d e f", "does not know this program"),
]


@pytest.mark.parametrize(("line", "what"), _REFUSED)
def test_a_program_that_is_not_known_is_one_sentence(line: str, what: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        check(*line.split())
    (error,) = caught.value.exceptions
    assert what in str(error)


@pytest.mark.parametrize("line", ["axolotl train a.yml", "trl sft --config a.yml", "swift sft a.yml"])
def test_a_recipe_that_is_no_yaml_is_one_sentence(line: str) -> None:
    Path("a.yml").write_text("base_model: m\n  micro_batch_size: [8\n")
    with pytest.raises(ExceptionGroup) as caught:
        check(*line.split())
    (error,) = caught.value.exceptions
    assert "error[recipe-unreadable]: the recipe can't be read\n  found: a.yml:2" in str(error)


def test_files_that_a_line_names_are_not_fixed() -> None:
    Path("ds.json").write_text(json.dumps({**_DEEPSPEED, "train_micro_batch_size_per_gpu": 8}))
    text = "torchrun sft.py --deepspeed ds.json --per_device_train_batch_size 4\n"
    report = _check(text)
    assert [bool(finding.edits) for finding in report.findings] == [True]
    assert not any(is_fixable(finding, report.targets.files) for finding in report.findings)
    typed = check(*text.split())
    assert all(is_fixable(finding, typed.targets.files) for finding in typed.findings)


def test_a_missing_recipe_is_named() -> None:
    assert _told(check("axolotl", "train", "none.yml")) == ["None named-file-missing: none.yml"]


_OF_PROGRAMS = [
    ("llamafactory-cli train --stage sft --evaluation_strategy steps", ["--evaluation_strategy steps"]),
    (
        "lmf train --stage dpo --no_cuda true --per_gpu_train_batch_size=2",
        ["--no_cuda true", "--per_gpu_train_batch_size=2"],
    ),
    ("trl sft --dataset_name d --evaluation_strategy=epoch", ["--evaluation_strategy=epoch"]),
    ("swift sft --model m --train_type lora --bf16 true --fp16 true", ["--bf16 true with --fp16 true"]),
    (
        "trl dpo --load_best_model_at_end --eval_strategy steps --save_strategy epoch",
        ["--load_best_model_at_end with --eval_strategy steps and --save_strategy epoch"],
    ),
    (
        "swift rlhf --deepspeed ds.json --per_device_train_batch_size 8",
        ["train_micro_batch_size_per_gpu=4 with --per_device_train_batch_size 8"],
    ),
    ("accelerate launch -m swift.cli.sft --evaluation_strategy no", ["--evaluation_strategy no"]),
    ("torchrun -m llamafactory.cli train --stage sft --evaluation_strategy no", ["--evaluation_strategy no"]),
    (
        "accelerate launch -m axolotl.cli.train axolotl.yml --micro-batch-size 8",
        ["train_micro_batch_size_per_gpu=4 with --micro-batch-size 8"],
    ),
    (
        "llamafactory-cli train llama_factory.yaml per_device_train_batch_size=16",
        ["train_micro_batch_size_per_gpu=4 with --per_device_train_batch_size=16"],
    ),
    ("trl sft --optim adamw_torchh --model_name_or_path m", ["--optim adamw_torchh"]),
]


@pytest.mark.parametrize(("line", "found"), _OF_PROGRAMS)
def test_flags_of_other_programs_are_training_arguments(line: str, found: list[str]) -> None:
    for recipe, text in _RECIPES.items():
        Path(recipe).write_text(text.format(4))
    assert [finding.found for finding in _check(f"{line}\n").findings] == found


@pytest.mark.parametrize(
    "line",
    [
        "llamafactory-cli train --stage sft --overwrite_output_dir true --template qwen --cutoff_len 512",
        "swift sft --warmup_ratio 0.05 --group_by_length true --logging_dir l --tuner_type lora --no_such 1",
        "axolotl train axolotl.yml --evaluation-strategy steps --optimizer muon --bf16 auto",
        "trl sft --load_best_model_at_end --eval_strategy steps --use_peft --lora_r 8 --warmup_ratio 0.1",
        "swift sft --deepspeed zero3 --per_device_train_batch_size 8 --eval_strategy no",
        "swift export --evaluation_strategy no",
    ],
)
def test_flags_of_their_own_are_unknown(line: str) -> None:
    Path("axolotl.yml").write_text(_RECIPES["axolotl.yml"].format(4))
    assert _told(_check(f"{line}\n")) == []


def test_a_former_key_of_a_llama_factory_recipe() -> None:
    Path("r.yaml").write_text(
        "stage: sft\nfinetuning_type: lora\nevaluation_strategy: steps\nwarmup_ratio: 0.1\n"
    )
    assert _told(check("llamafactory-cli", "train", "r.yaml")) == [
        "r.yaml:3 training-argument-unknown: evaluation_strategy=steps"
    ]


_MACHINES = (
    "accelerate launch --use_deepspeed --zero_stage 2 --num_machines {} --machine_rank {} {} train.py\n"
)
_SECTION = (
    "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n"
)
_OF_FILE = "accelerate launch --config_file acc.yaml --num_machines $N --machine_rank $RANK train.py\n"


@pytest.mark.parametrize(
    ("line", "section", "is_found"),
    [
        (_MACHINES.format("$NODES", "$RANK", ""), "", True),
        (_MACHINES.format("${SLURM_NNODES}", "$SLURM_NODEID", "--main_process_ip $HEAD"), "", True),
        (_MACHINES.format("$(cat nodes | wc -l)", "$1", ""), "", True),
        (_OF_FILE, _SECTION, True),
        ("srun bash -c '" + _MACHINES.format("$SLURM_NNODES", "$SLURM_PROCID", "").strip() + "'\n", "", True),
        (_MACHINES.format("$NODES", "$RANK", "--deepspeed_multinode_launcher standard"), "", False),
        (_MACHINES.format("$NODES", "$RANK", "--deepspeed_hostfile hosts"), "", False),
        (_MACHINES.format("$NODES", "$RANK", "--deepspeed_multinode_launcher $LAUNCHER"), "", False),
        (_OF_FILE, _SECTION + "  deepspeed_multinode_launcher: standard\n", False),
        (_OF_FILE, "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\n", False),
        (_MACHINES.format("1", "$RANK", ""), "", False),
        (_MACHINES.format("$NODES", "0", ""), "", False),
    ],
)
def test_machines_that_a_job_numbers_need_the_standard_launcher(
    line: str, section: str, is_found: bool
) -> None:
    Path("acc.yaml").write_text(section)
    told = [finding for finding in _check(line).findings if finding.rule == "multinode-needs-hostfile"]
    assert len(told) == is_found
    assert all(finding.fix == "add --deepspeed_multinode_launcher standard" for finding in told)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export MASTER_ADR=node1\n", "run.sh:1 MASTER_ADR=...: write MASTER_ADDR"),
        (
            "set -e\nexport CUDA_VISIBLE_DEVICE=0,1\n",
            "run.sh:2 CUDA_VISIBLE_DEVICE=...: write CUDA_VISIBLE_DEVICES",
        ),
        (
            "export HF_HOME=/x TOKENIZER_PARALELISM=false\n",
            "run.sh:1 TOKENIZER_PARALELISM=...: write TOKENIZERS_",
        ),
        ("NCCL_SOCKET_IFNMAE=eth0 ", "run.sh:1 NCCL_SOCKET_IFNMAE=...: write NCCL_SOCKET_IFNAME"),
        ("ulimit -l 1; export OMP_NUM_THREAD=8\n", "run.sh:1 OMP_NUM_THREAD=...: write OMP_NUM_THREADS"),
        (
            "declare -x PYTORCH_CUDA_ALOC_CONF=x\n",
            "run.sh:1 PYTORCH_CUDA_ALOC_CONF=...: write PYTORCH_CUDA_ALLOC_CONF",
        ),
        ("export MASTER_ADDR=node1 NCCL_IB_TC=106 NCCL_IB_SL=3 NODE_RANK=0\n", ""),
        ("export MASTER_ADR=node1\nexport MASTER_ADDR=$MASTER_ADR\n", ""),
        ("MASTER_ADR=node1\n", ""),  # no program gets it
        ("# export MASTER_ADR=node1\n", ""),
        ("export WORLD_SIZE1=2\necho ${WORLD_SIZE1}\n", ""),
        ("export PYTORCH_HIP_ALLOC_CONF=x HF_HUB_ENABLE_HF_TRANSFER=1 NCCL_NET=Socket\n", ""),
        ("export HCCL_SOCKET_IFNAME=eth0 MUSA_VISIBLE_DEVICES=0 MUSA_LAUNCH_BLOCKING=1\n", ""),
        ("export A=1" + " A=1" * 20_000 + "\n", ""),  # in no time
    ],
)
def test_a_variable_that_is_almost_a_librarys(text: str, found: str) -> None:
    findings = _check(f"{text}python train.py --lr 1\n").findings
    told = [
        f"{finding.place} {finding.found}: {finding.fix}"
        for finding in findings
        if finding.rule == "environment-variable-misspelt"
    ]
    assert len(told) == bool(found)
    assert all(line.startswith(found) for line in told)


def test_a_variable_that_the_script_reads_is_its_own() -> None:
    Path("own.py").write_text("import os\naddress = os.environ['MASTER_ADR']\n")
    line = "export MASTER_ADR=node1\npython {}.py\n"
    assert [finding.rule for finding in _check(line.format("train")).findings] == [
        "environment-variable-misspelt"
    ]
    assert _check(line.format("own")).findings == ()


_ARGUMENTS_ALONE = "from transformers import TrainingArguments\n"


@pytest.mark.parametrize(
    ("script", "rule"),
    [
        ("TrainingArguments('out', evaluation_strategy='steps')\n", "training-argument-unknown"),
        ("args = TrainingArguments('out', bf16=True, fp16=True)\n", "trainer-takes-one-half-precision"),
        (
            "from own import fit\nfit(TrainingArguments('out', lerning_rate=1e-4))\n",
            "training-argument-unknown",
        ),
        (
            "from sentence_transformers import SentenceTransformerTrainer\n"
            "args = TrainingArguments('out', optim='adam')\nSentenceTransformerTrainer(args=args)\n",
            "trainer-unknown-optimizer",
        ),
        (
            "def arguments():\n    return TrainingArguments('out', overwrite_output_dir=True)\narguments()\n",
            "training-argument-unknown",
        ),
        ("args = TrainingArguments('out', eval_strategy='steps')\n", ""),
        ("from accelerate import Accelerator\nAccelerator()\nTrainingArguments('out', seed=2)\n", ""),
    ],
)
def test_training_arguments_are_checked_where_the_trainer_is_elsewhere(script: str, rule: str) -> None:
    told = {finding.rule for finding in _check(_ARGUMENTS_ALONE + script, "arguments.py").findings}
    assert told == ({rule} if rule else set())
