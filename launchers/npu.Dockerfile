# An image with the tested set for Ascend NPUs, built from the lock on an image of CANN 9. Never run: no NPU was at hand.
#   docker build -f launchers/npu.Dockerfile -t finetune:npu .
#   docker run --rm --ipc host --network host --ulimit memlock=-1 \
#     --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#     -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/dcmi:/usr/local/dcmi:ro \
#     -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro \
#     -v "$PWD/runs:/finetune/runs" finetune:npu launch sft --config ds_configs/zero3_no_offload.json
# One --device /dev/davinciN for each NPU. The driver is the host's; CANN, torch and torch_npu must fit one another and it (`doctor`).
ARG BASE=quay.io/ascend/cann:9.0.0-910b-ubuntu22.04-py3.11
FROM ${BASE}

ARG TORCH="torch==2.10.0 torch_npu==2.10.0"
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make ninja-build \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /finetune
# What the environment is made of comes first: the layer stays while only the code changes.
COPY Makefile setup.cfg pyproject.toml constraints.txt requirements.lock README.md ./
COPY finetune/version.py finetune/version.py
COPY finetune/__init__.py finetune/__init__.py
RUN make TORCH="${TORCH}" .venv/.ready && rm -rf /root/.cache
COPY . .
RUN touch .venv/.ready && useradd --create-home trainer && chown -R trainer .venv && install -d -o trainer runs logs
USER trainer
ENV PATH=/finetune/.venv/bin:${PATH}
# set_env.sh tells torch_npu where CANN is.
ENTRYPOINT ["/bin/bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec python -m finetune \"$@\"", "finetune"]
CMD ["doctor"]
