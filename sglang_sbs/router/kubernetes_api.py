"""Opens and reads the Kubernetes API. Needs the package of the extra ``kubernetes``, imported only
when used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


class ApiError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


async def open_api(flag: str) -> ApiClient:
    """Open a client for the cluster of the kubeconfig file, or else for the one this process runs
    in. ``flag`` is named in errors. Raises: ValueError, there is neither, or it cannot be used."""
    from kubernetes_asyncio import client, config

    configuration = client.Configuration()
    usual = Path.home() / ".kube" / "config"
    path = os.environ.get("KUBECONFIG") or (str(usual) if usual.exists() else None)
    try:
        if path is not None:
            await config.load_kube_config(config_file=path, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise ValueError(
            f"{flag}: no access to the Kubernetes API ({error}); run this in a pod "
            "with a service account, or name a kubeconfig file in KUBECONFIG"
        ) from error
    return client.ApiClient(configuration)


async def read_answer(response: Any) -> dict[str, Any]:
    """Return the JSON object of a response requested with ``_preload_content=False``.
    Raises: ApiError, the status is an error; ValueError, the body is not a JSON object."""
    async with response:
        raw = await response.read()
        if not 200 <= response.status < 300:
            raise ApiError(response.status, _message(raw))
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        raise ValueError("the API server's response is not an object")
    return answer


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
