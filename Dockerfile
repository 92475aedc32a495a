# docker build --build-arg PLATFORM=cpu|cuda|tpu --tag bert_jax .
FROM python:3.12-slim

ARG PLATFORM=cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# libibverbs and libmlx5, which NCCL loads for RDMA.
RUN if [ "$PLATFORM" = cuda ]; then \
        apt-get update && apt-get install --yes --no-install-recommends ibverbs-providers && rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /opt/bert_jax
COPY LICENSE README.md setup.cfg setup.py ./
COPY constraints constraints
COPY bert_jax bert_jax
COPY data_prep data_prep
COPY configs configs
# The CPU's image is the one that prepares corpora.
RUN case "$PLATFORM" in \
        cpu) extra="[formats,languages,web]" ;; \
        cuda) extra="[cuda13,gcs]" ;; \
        tpu) extra="[tpu,gcs]" ;; \
        *) echo "PLATFORM is cpu, cuda or tpu, not $PLATFORM" >&2; exit 2 ;; \
    esac \
    && pip install --constraint "constraints/$PLATFORM-py312.txt" ".$extra"

RUN useradd --create-home --uid 1000 bert
USER bert
WORKDIR /home/bert
ENTRYPOINT ["bert-jax"]
CMD ["--help"]
