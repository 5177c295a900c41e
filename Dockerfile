# README's two commands in a container, for CPUs: docker build -t fmoe_ext . && docker run --rm -it fmoe_ext
# With CUDA: another FROM, an image that has nvcc, and FMOE_CUDA=1.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /fmoe_ext
COPY . .
ENV FMOE_CUDA=0 PIP_NO_CACHE_DIR=1
# --build-arg TORCH_INDEX=... is the index that PyTorch's page names for "CPU": it saves gigabytes. It is asked for torch
# alone, since it need not have the other packages.
ARG TORCH_INDEX
RUN test -z "$TORCH_INDEX" || pip install --index-url "$TORCH_INDEX" torch
RUN pip install torch numpy setuptools ninja
RUN pip install -e '.[train]' --no-build-isolation
CMD ["fmoe", "info"]
