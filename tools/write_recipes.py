"""python -m tools.write_recipes: renders the recipes of launch/ for clusters, as `zerofit submit` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerofit.configs.write.write_files import write_files
from zerofit.core.facts import GpuSpec, Machine, Versions
from zerofit.core.plan import Plan, Topology
from zerofit.core.presets import find_preset
from zerofit.core.units import GIB
from zerofit.core.version import VERSION
from zerofit.launching.clusters import kubernetes, skypilot, slurm
from zerofit.launching.clusters.job import ClusterFlags, Job, Resources, Submission

_RUN = "2026-01-01_00-00-00-train"
_HEAD = """\
# An example for 2 nodes of 8 GPUs and 24 hours, written by `make presets` with what renders your own:
#   zerofit submit --on {engine} --dry-run --num-machines 2 --gpus 8xA100-80G train.py ARGS
# Without --dry-run that writes the run folder, with plan.json and job.json, and submits the run.
"""


def recipe_files() -> dict[str, str]:
    """Return the text of each recipe by its path below the repository's root."""
    job_set = replace(_FLAGS, has_trainer=False)
    bucket = replace(_FLAGS, volume="s3://checkpoints:/data")
    rendered = {
        "launch/slurm.sbatch": slurm.render(_example("slurm", slurm, _FLAGS)),
        "launch/trainjob.yaml": kubernetes.render(_example("kubernetes", kubernetes, _FLAGS)),
        "launch/jobset.yaml": kubernetes.render(_example("kubernetes", kubernetes, job_set)),
        "launch/skypilot.yaml": skypilot.render(_example("skypilot", skypilot, bucket)),
    }
    files = {}
    for name, one in rendered.items():
        text = next(iter(one.files.values()))  # of Kubernetes' two files the job's
        first, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
        engine = "kubernetes" if name.endswith(("trainjob.yaml", "jobset.yaml")) else Path(name).stem
        files[name] = f"{first}\n{_HEAD.format(engine=engine)}{rest}".lstrip("\n")
    return files


_FLAGS = ClusterFlags(
    partition="gpu",
    wall_time_s=24 * 3600,
    image="registry.example/train:1",
    volume="checkpoints:/data",
    env=("HF_TOKEN",),
)


def _example(engine: str, module: object, flags: ClusterFlags) -> Submission:
    folder = Path("/shared/project/zerofit-runs") / _RUN
    gpu = GpuSpec(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB)
    machine = Machine(
        gpus=(gpu,) * 8, num_cpu_cores=48, host_memory_bytes=900 * GIB, host_memory_available_bytes=900 * GIB
    )
    plan = Plan(
        strategy=find_preset("z2").strategy,
        topology=Topology(num_nodes=2, world_size=16),
        machine=machine,
        versions=Versions(python="3.11", zerofit=VERSION),
        saves_when_told=True,
    )
    run_folder = getattr(module, "run_folder")(folder, flags)  # noqa: B009
    on_slurm = engine == "slurm"
    job = Job(
        run=_RUN,
        target=("train.py",),
        work_dir="/shared/project" if on_slurm else None,
        run_folder=run_folder,
        engine=engine,
        num_nodes=2,
        code_digest="",
        max_requeues=flags.max_requeues,
        join_limit_s=getattr(module, "JOIN_LIMIT_S"),  # noqa: B009
    )
    resources = Resources(
        num_nodes=2,
        gpus_per_node=8,
        cores_per_node=48,
        memory_bytes=200 * GIB,
        shm_bytes=100 * GIB,
        scratch_bytes=0,
        nvme_path=None,
        wall_time_s=None,
    )
    return Submission(
        job=job,
        plan=plan,
        resources=resources,
        flags=flags,
        folder=folder,
        environment={"HF_TOKEN": "", **({"HOME": "", "PATH": ""} if on_slurm else {})},
        gpus="8xA100-80G",
        python="/shared/project/.venv/bin/python" if on_slurm else "python",
    )


if __name__ == "__main__":
    write_files({Path(name): text for name, text in recipe_files().items()}, force=True)
