# An image with the tested set for NVIDIA GPUs, built from the lock:
#   docker build -f launchers/cuda.Dockerfile -t finetune:cuda .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/runs:/finetune/runs" finetune:cuda \
#     launch sft --config ds_configs/zero3_no_offload.json
# Shared memory is for loader processes and NCCL, memlock for pinned offload. Not built where there was no network.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

# Of the package index; another build of torch: --build-arg TORCH="torch==2.13.0 --index-url ..."
ARG TORCH="-c constraints.txt torch"
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev g++ make ninja-build libaio-dev \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /finetune
# What the environment is made of comes first: the layer stays while only the code changes.
COPY Makefile setup.cfg pyproject.toml constraints.txt requirements.lock README.md ./
COPY finetune/version.py finetune/version.py
COPY finetune/__init__.py finetune/__init__.py
RUN make TORCH="${TORCH}" .venv/.ready && rm -rf /root/.cache
COPY . .
# DeepSpeed builds operators at first use, in the environment: it must be the user's own.
RUN touch .venv/.ready && useradd --create-home trainer && chown -R trainer .venv && install -d -o trainer runs logs
USER trainer
ENV PATH=/finetune/.venv/bin:${PATH}
ENTRYPOINT ["python", "-m", "finetune"]
CMD ["doctor"]
