"""Rules on launch lines of batch jobs: what Slurm gives the job, where the line runs, what nothing sets."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import LaunchLayers, launch_value, whole_number
from zerofit.checking.inputs.batch_jobs import BatchJob, job_options
from zerofit.checking.inputs.programs import CONTAINERS, program_of, without_wrappers
from zerofit.checking.rule import Hit, Rule, Severity, declared, fails, ignored
from zerofit.core.command import ASSIGNMENT, Launcher, Route, is_literal
from zerofit.core.setting import Confidence, Said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.batch_jobs import JobOption
    from zerofit.checking.inputs.shell_lines import ShellLine
    from zerofit.checking.situation import Situation
    from zerofit.core.command import Flag, LaunchCommand
    from zerofit.scripts.facts import Model

_SBATCH = "https://slurm.schedmd.com/sbatch.html"
_SRUN = "https://slurm.schedmd.com/srun.html"
_NEEDS_SLURM = "needs Slurm"
_FREE_TEXTS = ("output", "error", "input", "chdir", "job-name", "comment", "mail-user", "export", "wckey")
"""Options that take any text, so that Slurm does not refuse a variable's name."""
_ON_NODES_WORDS = """
    srun ssh pdsh pssh parallel-ssh clush dsh mpirun mpiexec orterun prun ibrun jsrun aprun kubectl
    """
_ON_NODES = frozenset(_ON_NODES_WORDS.split())
"""Commands that start a program on other nodes."""
_LAUNCHERS = (Launcher.ACCELERATE, Launcher.TORCHRUN, Launcher.DEEPSPEED)
_MACHINES = ("num_machines", "nnodes", "num_nodes")
_RANKS = ("machine_rank", "node_rank")
_ONE_TASK = "--ntasks-per-node=1"


@Rule(
    id="sbatch-variable-not-expanded",
    severity=Severity.ERROR,
    summary="an #SBATCH line has a shell variable",
    why="Slurm reads these lines itself, before any shell: it takes the variable's name for the value",
    fix="write the value, or give the option on the command line of sbatch",
    see=_SBATCH,
    evidence=fails(not_reproduced=_NEEDS_SLURM),
)
def _unexpanded(situation: Situation) -> Iterator[Hit]:
    job = _job_of(situation)
    for option in job.options if job is not None else ():
        if option.value is not None and re.search(r"\$[\w{(]|`", option.value):
            is_text = option.name in _FREE_TEXTS
            fix = f"write the value, or give it to sbatch: sbatch {option.text} JOB"
            if is_text:
                fix = "write the text; %j stands for the job's number, %x for its name, %u for the user"
            confidence = Confidence.LIKELY if is_text else Confidence.CERTAIN
            yield Hit(found=f"#SBATCH {option.text}", place=option.place, fix=fix, confidence=confidence)


@Rule(
    id="sbatch-tasks-contradict",
    severity=Severity.WARNING,
    summary="the numbers of nodes and tasks of an #SBATCH header don't agree",
    why="beside --ntasks, --ntasks-per-node is only the most tasks that a node may get",
    fix="leave --ntasks out, or set it to the nodes times the tasks of a node",
    see=_SBATCH,
    evidence=ignored(not_reproduced=_NEEDS_SLURM),
)
def _contradicting_tasks(situation: Situation) -> Iterator[Hit]:
    job = _job_of(situation)
    tasks, per_node = (job.find("ntasks"), job.find("ntasks-per-node")) if job else (None, None)
    if job is None or tasks is None or not tasks.number:
        return
    nodes, step, number = job.number("nodes"), _step_of(situation), per_node.number if per_node else None
    behind = "" if nodes is None else f" on {nodes} node{'s' * (nodes > 1)}"
    fix = f"leave {tasks.text} out" if step is None else _one_task_a_node(job, step)
    if per_node is None and nodes is not None and tasks.number < nodes:
        why = "Slurm gives a job no more nodes than tasks"
        yield Hit(found=f"{tasks.text}{behind}", place=tasks.place, why=why, fix=fix)
    if per_node is None or not number:
        return
    if tasks.number >= number and nodes in (None, -(-tasks.number // number)):
        return
    if nodes is not None and step is None:
        fix += f", or write --ntasks={nodes * number}"
    yield Hit(found=f"{tasks.text} with {per_node.text}{behind}", place=tasks.place, fix=fix)


@Rule(
    id="sbatch-output-folder-too-late",
    severity=Severity.WARNING,
    summary="the folder of a job's output is made once the job runs, or named after its number",
    why="Slurm opens the files of the output before it starts the job: without the folder, the job fails at "
    "once and leaves no output",
    fix="make the folder before sbatch",
    see=_SBATCH,
    evidence=fails(not_reproduced=_NEEDS_SLURM),
)
def _output_folder_too_late(situation: Situation) -> Iterator[Hit]:
    if (job := _job_of(situation)) is None:
        return
    outputs = [option for option in (job.find("error"), job.find("output")) if option and option.value]
    by_folder = {(option.value or "").rpartition("/")[0]: option for option in outputs}
    for folder, option in by_folder.items():
        if not folder or "$" in folder:
            continue
        if match := re.search(r"%\d*[jA]", folder):
            behind = (option.value or "")[match.start() :]
            why = f"no folder is named after the job's number ({match[0]}) before the job has one"
            fix = f"write {option.text.replace(behind, behind.replace('/', '-'))}"
        elif str(PurePosixPath(folder)) in job.made_folders:
            why, fix = None, f"run mkdir -p {shlex.quote(folder)} before sbatch"
        else:
            continue
        yield Hit(
            found=f"#SBATCH {option.text}" if option.place else option.text,
            place=option.place,
            why=why,
            fix=fix,
            confidence=Confidence.LIKELY,
        )


@Rule(
    id="launch-needs-more-than-job",
    severity=Severity.ERROR,
    summary="the launch line and the job's #SBATCH header don't agree",
    why="the launcher counts on GPUs and nodes that Slurm does not give the job",
    fix="write the same numbers in both",
    see=_SBATCH,
    evidence=fails(not_reproduced=_NEEDS_SLURM),
)
def _beyond_the_job(situation: Situation) -> Iterator[Hit]:
    step = _step_of(situation)
    if step is None:
        return
    machines, nodes = step.machines, step.header.nodes
    asked = None if machines is None else whole_number(machines.value)
    if machines is not None and asked and nodes and asked > nodes:
        option = step.header.find("nodes") or step.header.find("ntasks")
        why = "the launcher waits for nodes that the job does not have"
        text = f"#SBATCH {option.text}" if option is not None else f"{nodes} nodes"
        fix = f"write {_with_number(machines, nodes)}, or #SBATCH --nodes={asked}"
        yield Hit(found=f"{machines.text} with {text}", why=why, fix=fix)
    found, gpus = step.ranks_per_node, step.job.gpus_per_node
    if found is None or gpus is None:
        return
    ranks, said = found
    number, option = gpus
    is_of_all = step.command.launcher is Launcher.ACCELERATE
    tasks = step.job.tasks_per_node if step.is_under_srun else 1
    if tasks and ranks * tasks > number:
        times = f", started by {tasks} tasks a node," if tasks > 1 else ""
        why = f"{ranks * tasks} ranks a node, and {number} GPU{'s' * (number > 1)}: invalid device ordinal"
        fixes = [_one_task_a_node(step.job, step)] if tasks > 1 else []
        if ranks > number:
            of_all = (nodes or 1) if is_of_all else 1
            fixes.append(f"write {_with_number(said, number * of_all)}, or ask for {ranks} GPUs a node")
        found_text = f"{said.text}{times} with #SBATCH {option.text}"
        yield Hit(found=found_text, why=why, fix="; ".join(fixes))
    if is_of_all and nodes and nodes > 1 and ranks < number:
        yield Hit(
            found=f"{said.text} with #SBATCH {option.text} on {nodes} nodes",
            why=f"accelerate counts the ranks of all {nodes} nodes together, so that GPUs stay idle",
            fix=f"write --num_processes {number * nodes}",
            confidence=Confidence.LIKELY,
        )


def _one_task_a_node(job: BatchJob, step: _Step) -> str:
    """Return the fix for a job whose tasks are counted as ranks, though a launcher starts these."""
    tasks = [option for option in job.options if option.name == "ntasks"]
    beside = f" in place of {tasks[-1].text}" if tasks else ""
    return f"write {_ONE_TASK}{beside}: {step.command.program} starts the ranks of its node"


def _with_number(said: Said[Any], number: int) -> str:
    """Return a flag with another number, as the user writes it."""
    return f"{said.text.removesuffix(str(said.value))}{number}"


@Rule(
    id="launch-on-first-node-only",
    severity=Severity.ERROR,
    summary="only the job's first node runs the launch line",
    why="Slurm runs a batch script on one node; the others wait for srun to start something",
    fix="write srun before the command, with one task a node",
    see=_SRUN,
    evidence=fails(not_reproduced=_NEEDS_SLURM),
)
def _on_first_node(situation: Situation) -> Iterator[Hit]:
    step = _step_of(situation)
    if step is None or not step.job.nodes or step.job.nodes < 2 or step.job.starts_own_code:
        return
    if any(program_of(word) in _ON_NODES for word in step.line.starters) or _meets_by_itself(step):
        return
    machines, nodes = step.machines, step.job.find("nodes") or step.job.find("ntasks")
    is_several = machines is not None and machines.value != "1" and whole_number(machines.value) != 1
    is_open = step.line.is_conditional or step.command.launcher is Launcher.DEEPSPEED
    is_open = is_open or (step.command.find("config_file") is not None and situation.accelerate is None)
    text = f" {machines.text}" if machines is not None and is_several else ""
    beside = f", with #SBATCH {nodes.text}" if nodes is not None else ""
    yield Hit(
        found=f"{step.command.program}{text} without srun{beside}",
        why="a batch script runs on the first node, and waits there for ranks that nothing starts"
        if is_several
        else None,
        fix=_start_on_each_node(step, counts_nodes=is_several or _is_open(situation, step)),
        confidence=Confidence.CERTAIN if is_several and not is_open else Confidence.LIKELY,
    )


def _start_on_each_node(step: _Step, *, counts_nodes: bool) -> str:
    """Return the fix for a line without srun, with what the line lacks once srun starts it on each node."""
    fix = f"write srun {_ONE_TASK} before the command"
    line, own = step.line, len(without_wrappers(step.line.words)[0])
    words = (*line.words[:own], "srun", _ONE_TASK, *line.words[own:])
    under = replace(step, line=replace(line, words=words))
    if (rank := _rank_of_all_nodes(under)) is not None:
        expanded = _expanded_by_task(under, rank)
        return expanded if "srun" in expanded and not line.outer else f"{fix}, and {expanded}"
    is_launcher_of_hosts = step.command.launcher is Launcher.DEEPSPEED
    return fix if counts_nodes or is_launcher_of_hosts else f"{fix}; {_count_nodes(step)}"


def _meets_by_itself(step: _Step) -> bool:
    """Return True if the launcher itself starts the ranks of other nodes, by ssh, or may do so."""
    hosts = launch_value(step.layers, "deepspeed_hostfile")
    return step.command.find("hostfile", "launcher", "force_multi") is not None or bool(hosts and hosts.value)


@Rule(
    id="nodes-train-alone",
    severity=Severity.ERROR,
    summary="srun starts the launcher on each node, and the launcher counts one node",
    why="torchrun and accelerate take one node by default, so that the nodes do not form one training",
    fix="give the launcher the job's number of nodes, and where they meet",
    see="https://docs.pytorch.org/docs/stable/elastic/run.html",
    evidence=fails(not_reproduced=_NEEDS_SLURM),
)
def _nodes_alone(situation: Situation) -> Iterator[Hit]:
    step = _step_of(situation)
    nodes = step.job.nodes if step is not None else None
    if step is None or not nodes or nodes < 2 or not step.is_under_srun or _is_for_one_node(step.line):
        return
    if step.command.launcher is Launcher.DEEPSPEED or step.job.starts_own_code or _is_open(situation, step):
        return
    if step.machines is not None and whole_number(step.machines.value) != 1:
        return
    flag = "num_machines" if step.command.launcher is Launcher.ACCELERATE else "nnodes"
    told = f"srun {step.command.program} "
    told += f"without --{flag}" if step.machines is None else step.machines.text
    option = step.job.find("nodes") or step.job.find("ntasks")
    yield Hit(
        found=f"{told}, with #SBATCH {option.text}" if option is not None else told,
        fix=_count_nodes(step),
        confidence=Confidence.LIKELY,
    )


def _count_nodes(step: _Step) -> str:
    """Return the fix for a launcher that is not told of the job's nodes."""
    if step.command.launcher is Launcher.ACCELERATE:
        return f"write --num_machines {step.job.nodes}, and --main_process_ip and --machine_rank"
    return f"write --nnodes {step.job.nodes}, and --rdzv_backend c10d --rdzv_endpoint"


def _is_open(situation: Situation, step: _Step) -> bool:
    """Return True if a file that is not here, a variable or the environment may give the number of nodes."""
    command = step.command
    names = {*step.line.variables.names, *(word.partition("=")[0] for word in step.line.starters)}
    is_in_file = command.find("config_file") is not None and situation.accelerate is None
    before = itertools.takewhile(lambda word: word != command.script, step.line.words)
    pairs = itertools.pairwise(("", *before))
    is_open = any(word.startswith("$") and not last.startswith("-") for last, word in pairs)
    is_told = command.find(*_MACHINES) is not None and step.machines is None
    return is_in_file or is_told or is_open or "PET_NNODES" in names


@Rule(
    id="tasks-leave-gpus-idle",
    severity=Severity.ERROR,
    summary="srun starts fewer processes than the job has GPUs, and no launcher that starts the others",
    why="a task is one process, and python starts no ranks: a GPU is used by one rank",
    fix="start a launcher in each node's task, or one task a GPU with RANK, LOCAL_RANK and WORLD_SIZE",
    see=_SRUN,
    evidence=ignored(not_reproduced=_NEEDS_SLURM),
)
def _idle_gpus(situation: Situation) -> Iterator[Hit]:
    step, route = _step_of(situation, launchers=(Launcher.PYTHON,)), situation.route
    if step is None or not step.is_under_srun or step.job.starts_own_code or situation.script is None:
        return
    asked, tasks, nodes = step.job.gpus_per_node, step.job.tasks_per_node, step.job.nodes or 1
    if route is None or asked is None or not tasks or tasks >= asked[0] or "use_cpu" in _keywords(situation):
        return
    gpus, option = asked
    if _is_for_one_node(step.line):
        nodes = 1
    uses_all = tasks == 1 and (route is Route.TRAINER or any(map(_is_spread, situation.script.models)))
    if (uses_all and nodes == 1) or "CUDA_VISIBLE_DEVICES" in step.line.variables.assigned:
        return
    whys = [] if uses_all else [f"{nodes * (gpus - tasks)} of {nodes * gpus} GPUs stay idle"]
    if nodes > 1 and "RANK" not in step.line.variables.assigned:
        whys.append("no process has its own RANK and LOCAL_RANK, so that each node trains alone")
    if not whys:
        return
    given = step.job.find("ntasks-per-node", "ntasks")
    found = " and ".join(_as_asked(asked) for asked in (given, option) if asked is not None)
    yield Hit(
        found=f"srun {_program_and_script(step)} with {found}{f' on {nodes} nodes' if nodes > 1 else ''}",
        why=f"a task is one process, and python starts no ranks: {'; '.join(whys)}",
        fix=_with_all_ranks(step, tasks=tasks, gpus=gpus, nodes=nodes),
        confidence=Confidence.LIKELY,
    )


def _is_spread(model: Model) -> bool:
    """Return True if one process may hold a model on several GPUs."""
    said = (word.value for word in model.keywords if word.name.partition(".")[0] == "device_map")
    return model.device_map is not None or any(value is not None for value in said)


def _keywords(situation: Situation) -> set[str]:
    """Return the arguments of the script's Accelerator() or TrainingArguments() that are not false."""
    script = situation.script
    given = (*script.accelerator_keywords, *script.training_arguments) if script is not None else ()
    return {"use_cpu" if keyword.name == "cpu" else keyword.name for keyword in given if keyword.value}


def _as_asked(option: JobOption) -> str:
    """Return an option as the header or the line of srun has it."""
    return option.text if option.place is None else f"#SBATCH {option.text}"


def _program_and_script(step: _Step) -> str:
    """Return the command of a task up to its script, without python's own flags."""
    words, script = without_wrappers(step.line.words)[1], step.command.script or ""
    is_module = "-m" in itertools.takewhile(lambda word: word != script, words)
    return f"{words[0]} {'-m ' if is_module else ''}{script}"


def _with_all_ranks(step: _Step, *, tasks: int, gpus: int, nodes: int) -> str:
    """Return the lines that start one rank a GPU."""
    program, _, target = _program_and_script(step).partition(" ")
    starters = list(step.line.starters)
    begin = next((at for at, word in enumerate(starters) if program_of(word) in CONTAINERS), len(starters))
    srun = " ".join(["srun", *starters[begin:]])
    host = "$MASTER_ADDR" if "MASTER_ADDR" in step.line.variables.names else "FIRST_NODE"
    meets = (
        f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint {host}:29500" if nodes > 1 else "--standalone"
    )
    ranks = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
    by_tasks = f"--ntasks-per-node={gpus} and {srun} bash -c '{ranks} {program} {target} ...'"
    by_launcher = f"write {srun} torchrun --nproc_per_node {gpus} {meets} {target} ..., or "
    return f"{by_launcher if tasks == 1 else 'write '}{by_tasks}"


@Rule(
    id="node-rank-of-batch-shell",
    severity=Severity.ERROR,
    summary="all nodes get the rank 0",
    why="the batch shell expands $SLURM_NODEID or $SLURM_PROCID before srun starts a task, always to 0",
    fix="let the shell of each task expand it: srun bash -c '... --node_rank $SLURM_NODEID ...', in single "
    "quotes or with a backslash",
    see=_SRUN,
    evidence=fails(not_reproduced=_NEEDS_SLURM),
)
def _same_rank(situation: Situation) -> Iterator[Hit]:
    step = _step_of(situation)
    if step is None or not step.is_under_srun or step.job.nodes == 1:
        return
    rank = _rank_of_all_nodes(step)
    if rank is None:
        return
    names = " or ".join(f"${name}" for name in step.line.from_batch_shell)
    is_sure = bool(step.job.nodes) and not step.line.is_conditional
    yield Hit(
        found=f"{rank.text} (from {names})" if names else rank.text,
        why=None if names else "srun starts the same line on each node, so that all have this rank",
        fix=_expanded_by_task(step, rank),
        confidence=Confidence.CERTAIN if is_sure else Confidence.LIKELY,
    )


def _rank_of_all_nodes(step: _Step) -> Flag | None:
    """Return the flag that gives rank 0 to each node on which srun starts the line; None if there is none."""
    rank, machines = step.command.find(*_RANKS), step.machines
    if rank is None or rank.value != "0" or _agree_on_ranks(step.command):
        return None
    is_for_one = machines is None or whole_number(machines.value) == 1 or _is_for_one_node(step.line)
    return None if is_for_one else rank


def _expanded_by_task(step: _Step, rank: Flag) -> str:
    """Return the flag, or the whole line, with which each task expands its node's rank itself."""
    flag, outer = f"--{rank.name} \\$SLURM_NODEID", step.line.outer
    if outer:
        return f"write {flag} in the {'quotes of srun bash -c' if '-c' in outer else 'lines for the shell'}"
    own = list(step.line.starters)
    begin = next(number for number, word in enumerate(own) if program_of(word) == "srun")
    first = next((at for at in range(begin, len(own)) if ASSIGNMENT.match(own[at])), len(own))
    words = [_in_quotes(word) for word in step.line.words]
    size = len(rank.words)
    places = (at for at in range(len(words)) if step.line.words[at : at + size] == rank.words)
    at = next(places, None)
    if at is None or any(word is None for word in words):
        return f"write {flag} in double quotes behind srun bash -c"
    words[at : at + size] = [flag]
    told = [word or "" for word in words]
    return f'write {" ".join(told[:first])} bash -c "{" ".join(told[first:])}"'


def _in_quotes(word: str) -> str | None:
    """Return a word as it is written between double quotes; None if that needs more than quotes."""
    if re.search(r'["\'\\`\n!]', word):
        return None
    return word if "$" in word and not re.search(r"[\s';&|<>*?]", word) else shlex.quote(word)


def _agree_on_ranks(command: LaunchCommand) -> bool:
    """Return True if the nodes' ranks come from their rendezvous, as in all backends but the static one."""
    backend, conf = command.find("rdzv_backend"), command.find("rdzv_conf")
    is_static = backend is None or backend.value == "static"
    return not is_static or (conf is not None and "rdzv_backend=" in (conf.value or ""))


def _is_for_one_node(line: ShellLine) -> bool:
    """Return True if srun is told which node, or only one, to start the line on."""
    options = BatchJob(options=tuple(job_options(list(line.starters))))
    is_named = options.find("nodelist", "relative", "r") is not None
    return is_named or 1 in (options.number("nodes"), options.number("ntasks"))


@Rule(
    id="shell-variable-unset",
    severity=Severity.WARNING,
    summary="nothing in the file sets the variable that the launch line starts",
    why="the shell puts nothing in its place, unless the environment sets it",
    fix="set the variable, or write ${NAME:?} if the environment has to",
    see="https://www.gnu.org/software/bash/manual/bash.html#Shell-Parameter-Expansion",
    evidence=fails(not_reproduced="the harness starts commands without a shell"),
)
def _unset(situation: Situation) -> Iterator[Hit]:
    line, command = situation.line, situation.command
    if line is None:
        return
    name = line.unset_command
    script = (command.script or "") if command is not None else ""
    if name is None and (match := re.fullmatch(r"\$([A-Za-z_]\w*)", script)) is not None:
        name = match[1] if line.variables.lacks(match[1]) else None
    if name is not None:
        near = line.variables.nearest(name)
        fix = f"write ${near}, which the file sets" if near else f"set {name} before this line"
        yield Hit(found=f"${name}", fix=fix, confidence=Confidence.LIKELY)


@Rule(
    id="environment-variable-misspelt",
    severity=Severity.WARNING,
    summary="the file sets a variable that no program reads, and that is almost one of a library's",
    why="an unknown name is no error: the program that should read it takes its default, or waits for a node",
    fix="write the library's name",
    see="https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization",
    evidence=ignored(not_reproduced="the harness starts commands without a shell"),
)
def _misspelt(situation: Situation) -> Iterator[Hit]:
    line = situation.line
    read_by_script = situation.script.variables if situation.script is not None else ()
    for variable in line.variables.misspelt if line is not None else ():
        if variable.name in read_by_script:
            continue
        place = replace(line.places[0], line=variable.line, column=1) if line and line.places else None
        yield Hit(
            found=f"{variable.name}=...",
            place=place,
            fix=f"write {variable.meant}",
            confidence=Confidence.LIKELY,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A launch line of a job."""

    header: BatchJob
    job: BatchJob
    """The header, and what the line's own srun asks for beside it."""
    line: ShellLine
    command: LaunchCommand
    layers: LaunchLayers

    @property
    def is_under_srun(self) -> bool:
        return any(program_of(word) == "srun" for word in self.line.starters)

    @property
    def machines(self) -> Said[str] | None:
        """The nodes that the launcher is told of."""
        flag = self.command.find(*_MACHINES)
        if flag is not None:
            return Said(value=flag.value, text=flag.text) if flag.value is not None else None
        is_accelerate = self.command.launcher is Launcher.ACCELERATE
        return launch_value(self.layers, "num_machines") if is_accelerate else None

    @property
    def ranks_per_node(self) -> tuple[int, Said[str]] | None:
        """The ranks that one launcher starts, and the flag that says it; None if not literal, or on a CPU."""
        if self.command.find("cpu", "use_cpu") is not None:
            return None
        names = ("num_processes",) if self.command.launcher is Launcher.ACCELERATE else _PER_NODE
        flag = self.command.find(*names)
        number = None if flag is None or not is_literal(flag.value) else whole_number(flag.value)
        if flag is None or not number:
            return None
        said = Said(value=flag.value or "", text=flag.text)
        if self.command.launcher is not Launcher.ACCELERATE:
            return number, said
        machines = self.machines
        nodes = self.job.nodes if machines is None else whole_number(machines.value)
        return (number // nodes, said) if nodes else None


_PER_NODE = ("nproc_per_node", "num_gpus")


def _job_of(situation: Situation) -> BatchJob | None:
    return None if situation.line is None else situation.line.job


def _step_of(situation: Situation, *, launchers: tuple[Launcher, ...] = _LAUNCHERS) -> _Step | None:
    """Return the launch line of a job, by one of these launchers; None for any other line."""
    line, job, command = situation.line, _job_of(situation), situation.command
    if line is None or job is None or command is None or command.launcher not in launchers:
        return None
    starters = list(line.starters)
    begin = next((at for at, word in enumerate(starters) if program_of(word) == "srun"), len(starters))
    both = replace(job, options=(*job.options, *job_options(starters[begin + 1 :])))
    layers = LaunchLayers(file=situation.accelerate, command=command)
    return _Step(header=job, job=both, line=line, command=command, layers=layers)


RULES = declared(vars())
