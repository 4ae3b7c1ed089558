"""A loop that asks for GPUs in the ways that scripts do."""

import io
import pickle

import safetensors.torch
import torch
from accelerate import Accelerator

assert torch.cuda.is_available()
assert torch.cuda.device_count() >= 1
batch_size = 4 // torch.cuda.device_count()
torch.distributed.init_process_group("nccl")
torch.set_default_device("cuda")
torch.set_default_device(None)
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator)
assert isinstance(torch.default_generator, torch.Generator)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
end.record()
end.synchronize()
assert start.elapsed_time(end) >= 0
with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()), torch.device("cuda"):
    torch.cuda.current_stream().synchronize()
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    ones = torch.ones(3)
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
torch.cuda.manual_seed_all(1)
torch.cuda.nvtx.range_push("step")
torch.cuda.nvtx.range_pop()
saved = io.BytesIO()
# what torch.save() itself writes is left out of a capture
torch.serialization._legacy_save({"ones": ones}, saved, pickle, 2)
for place in ("cuda", torch.device("cuda:0"), lambda storage, _: storage.cuda(0)):
    saved.seek(0)
    torch.load(saved, map_location=place)
with open("ones.safetensors", "wb") as file:
    header = b'{"ones":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    file.write(len(header).to_bytes(8, "little") + header + bytes(4))
safetensors.torch.load_file("ones.safetensors", device="cuda")
with safetensors.safe_open("ones.safetensors", "pt", device="cuda:0") as file:
    file.get_tensor("ones")
ones.pin_memory().cuda(non_blocking=True)
with torch.autocast("cuda", dtype=torch.bfloat16), torch.amp.autocast("cuda"), torch.cuda.amp.autocast():
    pass
scaler = torch.amp.GradScaler("cuda")

accelerator = Accelerator()
model = torch.nn.Linear(3, 1).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
data = torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=batch_size, pin_memory=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch.to("cuda", non_blocking=True)).square().mean())
