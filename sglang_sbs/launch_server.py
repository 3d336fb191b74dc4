"""`python -m sglang_sbs.launch_server`: a whole PD cluster with its router on one machine. How the
processes are planned and supervised is `sglang_sbs/cluster/`."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_sbs.cluster.flag_words import text_flag
from sglang_sbs.cluster.keys import VARIABLES, Keys, without_keys
from sglang_sbs.cluster.local import DEFAULT_STARTUP_TIMEOUT_S, LocalCluster
from sglang_sbs.cluster.plan import (
    PORTS_PER_INSTANCE,
    ClusterOptions,
    ClusterPlan,
    CpuEngines,
    PlanError,
    plan_cluster,
)
from sglang_sbs.cluster.ports import free_port_blocks, is_port_free
from sglang_sbs.cluster.serve import serve_until_stopped
from sglang_sbs.console.checkout import NotACheckoutError, checkout_module
from sglang_sbs.console.extras import only_in_a_checkout, without_sglang
from sglang_sbs.console.plain_words import naming_file, plain_error
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.option import port
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.tokenizer_files import tokenizer_folder

PROG = "python -m sglang_sbs.launch_server"
ROUTER_PREFIX = "--router-"
# Router flags that need no prefix, because no SGLang engine flag has the name.
UNPREFIXED_ROUTER_FLAGS = ("--policy", "--prefill-policy", "--decode-policy")
UNPREFIXED_ROUTER_PREFIX = "--sbs-"

EPILOG = """\
example: three prefill and one decode instance of two GPUs each (8 GPUs), scheduled by SBS

  python -m sglang_sbs.launch_server --model-path Qwen/Qwen3-30B-A3B \\
      --prefill-instances 3 --decode-instances 1 \\
      --tp 2 --attn-dp-size 2 --router-policy sbs

the same without GPUs, with the tiny model of the tests and modelled forward times (in a checkout)

  python -m sglang_sbs.launch_server --model-path "$(python -m tools.cpu_engine.tiny_model)" \\
      --prefill-instances 3 --decode-instances 1 \\
      --tp 2 --attn-dp-size 2 --virtual-gpu --router-policy sbs

Before SGLang 0.5.22 write --dp-size 2 --enable-dp-attention instead of --attn-dp-size 2.

--router-FLAG is passed to the router as --FLAG (python -m sglang_sbs.launch_router --help);
--policy, --prefill-policy, --decode-policy and --sbs-* need no prefix. Every other flag goes to
all SGLang engines as it is (python -m sglang.launch_server --help). --dry-run shows the result.
--api-key and --admin-api-key are the router's as well: clients need the same key. Flags with which
the router could not reach an engine (--ssl-*, --grpc-mode) are refused.
The router counts tokens with the model's tokenizer (fetched from Hugging Face when --model-path is
an id); --router-tokenizer-path names another.
"""


def build_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Build the parser of this launcher's own flags; `split_flags` divides all others."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Start SGLang prefill and decode instances and the router on this machine.",
        epilog=EPILOG.replace(PROG, prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-path", "--model", required=True, help="as for SGLang")
    add("--prefill-instances", type=int, default=1, metavar="N", help="how many (%(default)s)")
    add("--decode-instances", type=int, default=1, metavar="N", help="how many (%(default)s)")
    add("--host", default="127.0.0.1", help="address of the router (%(default)s)")
    add("--port", type=port, default=30000, metavar="PORT", help="port of the router (%(default)s)")
    text = 'flags of prefill engines only: --prefill-args="--max-running-requests 64"'
    add("--prefill-args", default="", metavar="FLAGS", help=text)
    add("--decode-args", default="", metavar="FLAGS", help="flags of decode engines only")
    add("--log-dir", type=Path, help="where each process writes its log (a new temporary folder)")
    text = "time until all instances and the router must be ready (%(default).0f)"
    limit = DEFAULT_STARTUP_TIMEOUT_S
    add("--startup-timeout", type=float, default=limit, metavar="SECONDS", help=text)
    text = "engines on CPU, which compute the model (in a checkout)"
    add("--cpu", action="store_true", help=text)
    text = (
        "engines on CPU, forward passes only take the time of a GPU (in a checkout); JSON "
        "with fields of tools.cpu_engine.virtual_gpu.VirtualGpuCost overrides its cost model"
    )
    add("--virtual-gpu", nargs="?", const="{}", metavar="JSON", help=text)
    add("--dry-run", action="store_true", help="print the exact command lines, less keys, and exit")
    return parser


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide flags into those of the engines and, without `--router-`, those of the router. A
    flag's values are all words up to the next word that starts with `--`. Raises: PlanError, a word
    before the first flag."""
    engine: list[str] = []
    router: list[str] = []
    target: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            if name.startswith(ROUTER_PREFIX):
                router.append("--" + word.removeprefix(ROUTER_PREFIX))
                target = router
                continue
            bare = name in UNPREFIXED_ROUTER_FLAGS or name.startswith(UNPREFIXED_ROUTER_PREFIX)
            target = router if bare else engine
        elif target is None:
            raise PlanError(f"{word!r} belongs to no flag: write --FLAG {word}")
        target.append(word)
    return engine, router


def plan_from_command_line(
    arguments: Sequence[str], prog: str = PROG
) -> tuple[ClusterPlan, argparse.Namespace, RouterOptions]:
    """Return the planned processes, this launcher's own flags, and the router's options. Exits with
    a message that names the flag if a flag is invalid or the plan is impossible."""
    parser = build_parser(prog)
    own, rest = parser.parse_known_args(arguments)
    try:
        engine_flags, router_flags = split_flags(rest)
        router = parse_flags(router_flags)
        options = ClusterOptions(
            model_path=own.model_path,
            prefill_instances=own.prefill_instances,
            decode_instances=own.decode_instances,
            engine_flags=engine_flags,
            prefill_flags=_words("--prefill-args", own.prefill_args),
            decode_flags=_words("--decode-args", own.decode_args),
            cpu=_cpu_engines(own.virtual_gpu) if _on_cpu(own) else None,
            log_dir=own.log_dir or _new_log_dir(own.dry_run),
            environment=dict(os.environ),
            router_flags=router_flags,
            router_tokenizer=_router_tokenizer(own.model_path, engine_flags, router),
            router_keys=Keys(router.api_key or "", router.admin_api_key or ""),
            router_host=own.host,
            router_port=own.port,
        )
        return plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE)), own, router
    except (PlanError, FlagError) as error:
        parser.error(str(error))


def _words(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        how = "quote its values as in a shell"
        raise PlanError(f"{flag}: {str(error).lower()} in {text!r}; {how}") from None


def _router_tokenizer(model: str, engine_flags: Sequence[str], router: RouterOptions) -> str:
    """Return a tokenizer path for the router. If the model has none that works, report it and
    return an empty string. Raises: PlanError, the user named an unusable tokenizer or template."""
    named = str(router.tokenizer_path or text_flag(engine_flags, "--tokenizer-path") or model)
    try:
        ChatTokenizer.load(tokenizer_folder(Path(named)), router.chat_template)
    except ValueError as error:
        if router.tokenizer_path is not None or router.chat_template is not None:
            raise PlanError(str(error)) from error
        how = "Give it a tokenizer with --router-tokenizer-path"
        print(f"the router will estimate prompt lengths: {error}. {how}", file=sys.stderr)
        return ""
    return named


def _new_log_dir(dry_run: bool) -> Path:
    if dry_run:
        return Path(tempfile.gettempdir()) / "sglang-sbs-logs"
    return Path(tempfile.mkdtemp(prefix="sglang-sbs-"))


def _on_cpu(own: argparse.Namespace) -> bool:
    return own.cpu or own.virtual_gpu is not None


def _cpu_engines(virtual_gpu: str | None) -> CpuEngines:
    try:
        module = checkout_module("tools.cpu_engine.engines")
        engines: CpuEngines = module.CpuEngines.from_flag(virtual_gpu)
    except NotACheckoutError:
        raise PlanError(f"--cpu and --virtual-gpu: {only_in_a_checkout('server')}") from None
    except ValueError as error:
        raise PlanError(f"--virtual-gpu: {error}") from None
    return engines


def describe(plan: ClusterPlan) -> str:
    """Return every process as a shell command, with its variables in addition to the inherited
    ones. Keys are shown as ``***``."""
    commands = []
    for process in plan.servers:
        added = dict(process.environment.items() - os.environ.items())
        added |= dict.fromkeys(added.keys() & set(VARIABLES.values()), "***")
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(added.items())]
        words = shlex.join(without_keys(process.argv))
        commands.append(f"# {process.name}\n" + " ".join([*variables, words]))
    return "\n\n".join(commands)


async def _say_ready(cluster: LocalCluster) -> None:
    if cluster.router is not None:
        logs = cluster.plan.log_dir
        print(f"Ready: {cluster.router.url} (logs: {logs}). Ctrl-C stops it.", flush=True)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> None:
    """Start the cluster and serve until stopped. Exits non-zero if it did not start or one of its
    processes died."""
    words = sys.argv[1:] if arguments is None else arguments
    plan, own, router = plan_from_command_line(words, prog)
    if own.dry_run:
        print(describe(plan))
        return
    if (lacking := without_sglang("server", on_cpu=_on_cpu(own))) is not None:
        sys.exit(lacking)
    ports = {"--port": own.port, "--router-prometheus-port": router.prometheus_port}
    for flag, number in ports.items():
        if not is_port_free(number):
            sys.exit(f"port {number} is in use: choose another with {flag}")
    try:
        with naming_file("--log-dir", plan.log_dir):
            plan.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(plain_error(error))
    sys.exit(asyncio.run(serve_until_stopped(plan, own.startup_timeout, _say_ready)))


if __name__ == "__main__":
    main()
