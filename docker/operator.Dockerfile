# The operator. From a checkout: make build && docker build -f docker/operator.Dockerfile -t kvist-operator .
# A digest makes it the same bytes every time: --build-arg PYTHON=python:3.11-slim-trixie@sha256:…
ARG PYTHON=python:3.11-slim-trixie

FROM ${PYTHON} AS install
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY docker/operator.lock dist/kvist-*.whl /build/
# Wheels alone, and none that is not in the lock: nothing is compiled, so nothing to compile with is needed.
RUN python -m venv --without-pip /opt/kvist \
 && pip --python /opt/kvist/bin/python install --only-binary=:all: --require-hashes --requirement /build/operator.lock \
 && pip --python /opt/kvist/bin/python install --no-index --no-deps /build/kvist-*.whl

FROM ${PYTHON}
RUN python -m pip uninstall --yes --quiet --root-user-action=ignore pip setuptools wheel \
 && rm -rf /usr/local/lib/python3.*/ensurepip
COPY --from=install /opt/kvist /opt/kvist
ENV PATH=/opt/kvist/bin:${PATH} HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
ARG PYTHON
ARG VERSION=0+unknown
LABEL org.opencontainers.image.title="kvist-operator" \
      org.opencontainers.image.description="From an InferencePool to tuned vLLM engines, their pickers and the way in" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${PYTHON}"
# By number, so that runAsNonRoot can be checked.
USER 65532:65532
EXPOSE 9095
ENTRYPOINT ["kvist-operator"]
