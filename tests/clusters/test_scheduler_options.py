"""--scheduler-option: what reaches the job of each scheduler, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from zerofit_in_process import run_in_process

from zerofit.core.errors import UserError
from zerofit.core.units import GIB
from zerofit.launching.clusters.job import ClusterFlags, Resources
from zerofit.launching.clusters.kubernetes_options import kubernetes_options
from zerofit.launching.clusters.sbatch_options import parse_sbatch_options

_MODEL = ("--model", "gpt2", "--sequence-length", "64", "--global-batch-size", "64", "--fast")
_NEEDED = Resources(
    num_nodes=2,
    gpus_per_node=8,
    cores_per_node=48,
    memory_bytes=96 * GIB,
    shm_bytes=48 * GIB,
    scratch_bytes=500 * GIB,
    nvme_path="/scratch",
    wall_time_s=3600,
)


def _submit(place: Path, on: str, *options: str, words: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Return exit code, job file and messages of a dry run with options for the scheduler."""
    (place / "train.py").write_text("")
    typed = [word for option in options for word in ("--scheduler-option", option)]
    if on == "kubernetes":
        words = ("--image", "registry.example/train:1", *words)
    flags = ("--json", "--dry-run", "--on", on, "--num-machines", "2", "--gpus", "8xH100", *_MODEL)
    done = run_in_process(("submit", *flags, *words, *typed, "train.py"), cwd=place)
    files = json.loads(done.stdout)["files"] if done.returncode == 0 else {"": ""}
    return done.returncode, list(files.values())[-1], done.stderr


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("qos=high", "--qos=high"),
        ("--reservation=nlp-week", "--reservation=nlp-week"),
        ("exclude=gpu[007-009,12]", '--exclude="gpu[007-009,12]"'),
        ("-w=gpu1", "--nodelist=gpu1"),
        ("exclusive", "--exclusive"),
        ("mail-type=END,FAIL", "--mail-type=END,FAIL"),
        ("dependency=afterok:1234", "--dependency=afterok:1234"),
        ("comment=a run of the week", '--comment="a run of the week"'),
        ("gres=gpu:a100:8,nvme:1", '--gres="gpu:a100:8,nvme:1"'),
        ("begin=2027-01-01T08:00:00", "--begin=2027-01-01T08:00:00"),
    ],
)
def test_sbatch_gets_an_option_as_it_was_typed(tmp_path: Path, option: str, line: str) -> None:
    code, job, said = _submit(tmp_path, "slurm", option)
    assert code == 0, said
    lines = [found.replace('"', "") for found in job.splitlines()]
    assert f"#SBATCH {line}".replace('"', "") in lines
    options = [found for found in lines if found.startswith("#SBATCH")]
    names = [found.split("=")[0] for found in options]
    assert len(names) == len(set(names))
    # sbatch reads no option behind the first command
    assert lines.index(options[-1]) < lines.index("set -u")


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("nodes=4", "use --num-machines"),
        ("N=4", "use --num-machines"),
        ("time=10:00", "use --time"),
        ("--time=10:00", "use --time"),
        ("ntasks-per-node=8", "one launcher a node"),
        ("gpus=16", "--gpus 8xH100"),
        ("signal=USR2@60", "use --save-time"),
        ("export=ALL", "name variables with --env"),
        ("array=0-3", "--write-only"),
        ("output=here.log", "zerofit runs logs"),
        ("no-requeue", "use --max-requeues 0"),
        ("partition=gpu", "use --partition"),
    ],
)
def test_what_submit_sets_itself_is_refused_with_its_flag(tmp_path: Path, option: str, fix: str) -> None:
    code, _, said = _submit(tmp_path, "slurm", option)
    assert code == 2
    assert said.startswith("error[scheduler-option]: an option for the scheduler can't be passed on\n")
    assert fix in said.splitlines()[-1]


@pytest.mark.parametrize(
    "option",
    [
        "qos",
        "qos=",
        "exclusive\n#SBATCH --uid=0",
        "comment=a\u2028b",
        f"comment={'x' * 2000}",
        "=high",
        "contiguous=yes",
        "QOS=high",
        "q o s=high",
        "gres=gpu:4",
        "gpus-per-node=a100:4",
        "mem=64G",
        "mem=64GB",
        "mem-per-gpu=4G",
        "mem-per-cpu=100",
        "tmp=1000",
    ],
)
def test_sbatch_gets_no_broken_option_and_none_for_less_than_the_plan_needs(option: str) -> None:
    with pytest.raises(UserError) as error:
        parse_sbatch_options([option], resources=_NEEDED)
    assert error.value.rule == "scheduler-option"
    assert "\n" not in error.value.found


@pytest.mark.parametrize(
    "option",
    ["mem=0", "mem=200G", "mem=1T", "mem-per-gpu=12G", "mem-per-cpu=2048", "tmp=600G", "gres=gpu:h100:8"],
)
def test_sbatch_may_be_asked_for_more_than_the_plan_needs(option: str) -> None:
    name, _, value = option.partition("=")
    assert parse_sbatch_options([option], resources=_NEEDED) == {name: value}


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--qos", "pass it to the scheduler: --scheduler-option qos=VALUE"),
        ("--exclude", "pass it to the scheduler: --scheduler-option exclude=VALUE"),
        ("--hold", "pass it to the scheduler: --scheduler-option hold"),
        ("--array", "leave it out; with --write-only you submit the job yourself, as you like"),
        ("--output", "leave it out: `zerofit runs logs` prints the output, which is in the run folder"),
        ("--annotation", "pass it to Kubernetes: --scheduler-option annotations.KEY=TEXT"),
        ("--labels", "pass it to Kubernetes: --scheduler-option labels.KEY=TEXT"),
        ("--zero-stagee", "did you mean --zero-stage?"),
    ],
)
def test_a_flag_of_a_scheduler_is_answered_with_the_option(tmp_path: Path, flag: str, fix: str) -> None:
    done = run_in_process(("submit", "--on", "slurm", flag, "x", "train.py"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"  fix:   {fix}"


def test_a_verb_of_runs_is_found_without_runs(tmp_path: Path) -> None:
    for verb in ("status", "logs", "cancel", "prune"):
        done = run_in_process((verb,), cwd=tmp_path)
        assert done.stderr.splitlines()[-1] == f"  fix:   did you mean zerofit runs {verb}?"


def test_an_option_is_given_once() -> None:
    with pytest.raises(UserError, match="can't be passed on"):
        parse_sbatch_options(["qos=high", "--qos=low"])
    with pytest.raises(UserError, match="can't be passed on"):
        parse_sbatch_options(["qos=high", "q=low"])


def test_a_replaced_request_and_an_unknown_option_are_said(tmp_path: Path) -> None:
    code, job, said = _submit(tmp_path, "slurm", "mem=0", "job-name=nightly", "resevation=nlp")
    assert code == 0
    assert "#SBATCH --mem=0" in job.splitlines()
    assert job.count("--mem=") == job.count("--job-name=") == 1
    assert "--mem of --scheduler-option replaces --mem=" in said
    assert "--resevation is no option of sbatch itself (did you mean --reservation?)" in said


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    """Return the template of a job's pods."""
    if job["kind"] == "JobSet":
        jobs = job["spec"]["replicatedJobs"]
    else:
        jobs = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template: dict[str, Any] = jobs[0]["template"]["spec"]["template"]
    return template


@pytest.mark.parametrize("words", [(), ("--job-set",)], ids=["TrainJob", "JobSet"])
def test_pods_get_fields_labels_and_annotations(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, text, said = _submit(
        tmp_path,
        "kubernetes",
        "tolerations=[{key: nvidia.com/gpu, operator: Exists}]",
        "serviceAccountName=trainer",
        "annotations.cluster-autoscaler.kubernetes.io/safe-to-evict=false",
        "annotations.example.com/note=two words: and more",
        "labels.example.com/team=nlp",
        "labels.kueue.x-k8s.io/queue-name=gpus",
        "resources.rdma/ib=1",
        "suspend=true",
        words=words,
    )
    assert code == 0, said
    job = yaml.safe_load(text)
    pod = _pod(job)
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"] == {"example.com/team": "nlp", "kueue.x-k8s.io/queue-name": "gpus"}
    assert pod["metadata"]["labels"] == {"example.com/team": "nlp"}  # Kueue admits the job, not each pod
    annotations = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "example.com/note": "two words: and more",
    }
    assert job["metadata"]["annotations"] == pod["metadata"]["annotations"] == annotations
    assert pod["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["spec"]["serviceAccountName"] == "trainer"
    container = pod["spec"]["containers"][0] if words else job["spec"]["trainer"]
    resources = container["resources" if words else "resourcesPerNode"]
    assert resources["limits"]["rdma/ib"] == resources["requests"]["rdma/ib"] == "1"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("containers=[]", "use --image, --env and --volume"),
        ("nodeSelector={a: b}", "use --node-selector"),
        ("restartPolicy=Always", "use --max-requeues"),
        ("activeDeadlineSeconds=60", "use --time"),
        ("resources.nvidia.com/gpu=4", "--gpus"),
        ("resources.cpu=4", "use --cpu-cores"),
        ("toleration=[]", "did you mean tolerations?"),
        ("tolerations", "it needs a value, in YAML"),
        ("tolerations=[{", "it needs a value, in YAML"),
        ("labels.team=two words", "a label's value has at most 63"),
        ("labels.=nlp", "it needs a key"),
        ("annotations./x=nlp", "it needs a key"),
        ("annotations.team", "it needs a key"),
        ("priorityClassName=high", "--job-set"),
    ],
)
def test_what_a_train_job_can_not_have_is_refused(option: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        kubernetes_options(ClusterFlags(options=(option,)))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("memory", "is_enough"),
    [("900Gi", True), ("1.5Ti", True), ("999G", True), ("64Mi", False), ("1000", False), ("lots", False)],
)
def test_pods_may_ask_for_more_memory_than_the_plan_needs(
    tmp_path: Path, memory: str, is_enough: bool
) -> None:
    code, text, said = _submit(tmp_path, "kubernetes", f"resources.memory={memory}")
    if is_enough:
        asked = yaml.safe_load(text)["spec"]["trainer"]["resourcesPerNode"]
        assert asked["requests"]["memory"] == asked["limits"]["memory"] == memory
    else:
        assert (code, "ask for at least resources.memory=" in said) == (2, True)


def test_a_runtime_of_the_cluster_replaces_kubeflows(tmp_path: Path) -> None:
    code, text, said = _submit(tmp_path, "kubernetes", "runtime=torch-with-ib")
    assert (code, yaml.safe_load(text)["spec"]["runtimeRef"]) == (0, {"name": "torch-with-ib"}), said
    assert _submit(tmp_path, "kubernetes", "priorityClassName=high", words=("--job-set",))[0] == 0


def test_sky_gets_keys_of_its_job(tmp_path: Path) -> None:
    code, text, said = _submit(
        tmp_path,
        "skypilot",
        "resources.use_spot=true",
        "resources.memory=512+",
        "resources.region=us-east-1",
        "resources.job_recovery.strategy=FAILOVER",
        "resources.any_of=[{infra: aws}, {infra: gcp/us-central1}]",
        "resources.labels.team=nlp",
        "setup=pip install -r requirements.txt",
    )
    assert code == 0, said
    job = yaml.safe_load(text)
    resources = job["resources"]
    assert (resources["use_spot"], resources["region"]) == (True, "us-east-1")
    assert (resources["accelerators"], resources["memory"]) == ("H100:8", "512+")
    assert resources["job_recovery"] == {"max_restarts_on_errors": 0, "strategy": "FAILOVER"}
    assert resources["any_of"] == [{"infra": "aws"}, {"infra": "gcp/us-central1"}]
    assert resources["labels"] == {"team": "nlp"}
    assert job["setup"] == "pip install -r requirements.txt"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("resources.accelerators=A100:1", "use --gpus"),
        ("resources.memory=1+", "ask for at least resources.memory="),
        ("resources.memory=4x", "ask for at least resources.memory="),
        ("resources.cpus=4", "use --cpu-cores"),
        ("resources={cloud: aws}", "name its fields"),
        ("resources.job_recovery={strategy: FAILOVER}", "use --max-requeues"),
        ("resources.any_of=[{accelerators: 'A100:1'}]", "use --gpus"),
        ("resources.ordered=[{infra: aws, image_id: 'docker:x'}]", "use --image"),
        ("resources.any_of=aws", "it must be a list of resources"),
        ("envs.HF_TOKEN=secret", "name variables with --env"),
        ("run=python train.py", "leave it out"),
        ("file_mounts./data=s3://bucket", "leave it out"),
        ("num_nodes=1", "use --num-machines"),
        ("resources.usespot=true", "did you mean resources.use_spot?"),
        ("setup", "it needs a value, in YAML"),
    ],
)
def test_what_submit_sets_in_a_job_of_sky_is_refused(tmp_path: Path, option: str, words: str) -> None:
    code, _, said = _submit(tmp_path, "skypilot", option)
    assert code == 2
    assert words in said
