# Not built and not run: written from constraints/cuda.txt, for one NVIDIA GPU of the Hopper class with a driver for CUDA 13.
# The devel image, since Triton, FlashAttention 4 and DeepGEMM compile at run time.
#   docker build -t aligned-zoo .
#   docker run --rm --gpus all aligned-zoo
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends git make gcc python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /aligned-zoo
COPY . .
RUN make install GPU=1 PYTHON=python3.12

CMD ["make", "verify", "GPU=1"]
