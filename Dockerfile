# zerofit with CUDA's compilers, which DeepSpeed needs to build its ops at first use.
#   docker build -t zerofit .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" zerofit launch train.py --epochs 3
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ ninja-build libaio-dev git \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/zerofit/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY zerofit zerofit
RUN python3 -m venv /opt/zerofit \
    && DS_BUILD_OPS=0 pip install --no-cache-dir --constraint constraints.txt . \
    && rm -rf /src

WORKDIR /work
ENTRYPOINT ["zerofit"]
CMD ["doctor"]
