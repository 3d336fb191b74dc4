# The router, without torch and SGLang.
#
#   docker build -t sglang-sbs .
#   docker run --network host sglang-sbs --pd-disaggregation \
#       --prefill http://p0:30000 8998 --decode http://d0:30000 --policy sbs
#
# For engines add the package to their own image instead, in this folder too:
#   COPY . /src
#   RUN pip install /src
# (SGLang before 0.5.11: && sglang-sbs patch apply).

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY patches patches
COPY sglang_sbs sglang_sbs
RUN python -m venv /opt/sglang-sbs \
    && /opt/sglang-sbs/bin/pip install --no-cache-dir '.[trace,kubernetes,jwt]'

FROM python:${PYTHON_VERSION}-slim
# A number, so that Kubernetes can tell that it is not root (runAsNonRoot).
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/sglang-sbs sglang-sbs
COPY --from=build /opt/sglang-sbs /opt/sglang-sbs
ENV PATH=/opt/sglang-sbs/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SGLANG_SBS_LIVENESS_URL=http://127.0.0.1:30000/liveness
USER 10001
WORKDIR /var/lib/sglang-sbs
# Requests, EndForward of the engines, metrics.
EXPOSE 30000 7600 29000
# With another --port, or TLS, set SGLANG_SBS_LIVENESS_URL to match.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(os.environ['SGLANG_SBS_LIVENESS_URL'], timeout=4)"]
ENTRYPOINT ["python", "-m", "sglang_sbs.launch_router"]
CMD ["--help"]
