"""The way to the Kubernetes API, for whatever part of the router asks it something. Needs the
package of the extra ``kubernetes`` and imports it only when asked to."""

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
    """A client for the cluster of the kubeconfig file, or else for the one this process runs in.
    ``flag``: what it is wanted for. Raises: ValueError, there is neither."""
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
            f"{flag}: no way to the Kubernetes API ({error}); run this in a pod "
            "with a service account, or name a kubeconfig file in KUBECONFIG"
        ) from error
    return client.ApiClient(configuration)


async def read_answer(response: Any) -> dict[str, Any]:
    """The object in an answer that was asked for with ``_preload_content=False``.
    Raises: ApiError, the status is none of success; ValueError, it holds no JSON object."""
    async with response:
        raw = await response.read()
        if not 200 <= response.status < 300:
            raise ApiError(response.status, _message(raw))
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        raise ValueError("the API server's answer is no object")
    return answer


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
