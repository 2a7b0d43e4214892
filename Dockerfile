# syntax=docker/dockerfile:1
# An image for one machine, or for the pods of `paceline kubernetes`:
#   docker build -t paceline .
#   docker build -t paceline --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm -v ./runs:/runs paceline train --preset demo --out /runs/one
# BASE is a Debian or Ubuntu with Python 3.11 to 3.14; TORCH_INDEX has torch's build for its processor or CUDA.
ARG BASE=debian:trixie-slim
# hadolint ignore=DL3006
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# torch.compile uses the compiler.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates g++ python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /opt/paceline
COPY constraints.txt .
RUN python3 -m venv venv && venv/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" -c constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
COPY examples/ring.py examples/ring.py
RUN venv/bin/pip install --no-cache-dir -c constraints.txt . && rm -rf build examples && \
    useradd --uid 10001 --create-home paceline && \
    install -d -o paceline /runs
ENV PATH=/opt/paceline/venv/bin:$PATH
USER 10001
WORKDIR /runs
ENTRYPOINT ["paceline"]
