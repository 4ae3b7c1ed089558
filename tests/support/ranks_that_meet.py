"""Ranks that meet, before and in a process group. Usage: torchrun ranks_that_meet.py OUTPUT"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from zerofit.core.errors import UserError
from zerofit.ranks.meeting import meet, watch
from zerofit.ranks.script_line import script_line


def found(limit_s):
    try:
        meet("model.generate", line=script_line(), limit_s=limit_s)
    except UserError as error:
        return error.found
    return None


watch()
meet("model.generate", line=script_line(), limit_s=60)  # nobody else is there yet
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(20):
    meet("model.generate", line=script_line(), limit_s=60)
alone = found(2.5) if rank == 0 else None
dist.barrier()  # where rank 1 waits
unwatched = found(0) if rank == 0 else None
together = found(60)
Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps([alone, unwatched, together]))
dist.destroy_process_group()
