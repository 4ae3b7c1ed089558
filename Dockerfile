# zerofit with CUDA's compilers, which DeepSpeed needs to build its ops at first use.
#   docker build -t zerofit .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" zerofit launch train.py --epochs 3
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ libaio-dev git \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/zerofit/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt ./
# torch first: DeepSpeed's source package asks it for its version while it is being built, and a build in isolation
# would fetch another torch. Neither is installed again where only zerofit has changed.
RUN python3 -m venv /opt/zerofit \
    && pip install --no-cache-dir --constraint constraints.txt torch setuptools wheel ninja hatchling \
    && DS_BUILD_OPS=0 pip install --no-cache-dir --constraint constraints.txt --no-build-isolation deepspeed
COPY pyproject.toml README.md LICENSE ./
COPY zerofit zerofit
RUN pip install --no-cache-dir --constraint constraints.txt --no-build-isolation .

WORKDIR /work
ENTRYPOINT ["zerofit"]
CMD ["doctor"]
