"""Findings about what engines have in common or hangs on them, routers and probes.

Ids are stable: tools may rely on them.
"""

from __future__ import annotations

from sglang_sbs.doctor.catalogue.entry import Entry, Severity

_OK, _NOTE, _WARNING, _ERROR = Severity

ENTRIES: dict[str, Entry] = {
    # Pair ------------------------------------------------------------------------------------
    "pair.ok": Entry(_OK, "Prefill and decode engines fit each other."),
    "pair.model": Entry(
        _ERROR,
        "Engines serve different models.",
        "start all engines of a cluster with the same --model-path and --served-model-name",
    ),
    "pair.transfer-backend": Entry(
        _ERROR,
        "KV cache cannot go from one transfer backend to another.",
        "the same --disaggregation-transfer-backend on prefill and decode",
    ),
    "pair.page-size": Entry(
        _ERROR,
        "Decode refuses a prefill engine with another page size.",
        "the same --page-size on prefill and decode",
    ),
    "pair.kv-dtype": Entry(
        _ERROR,
        "Decode refuses a prefill engine with another type of KV cache.",
        "the same --kv-cache-dtype on prefill and decode",
    ),
    "pair.allocation-policy": Entry(
        _ERROR,
        "Both sides must reserve decode memory at the same time.",
        "the same --disaggregation-decode-allocation-policy on prefill and decode",
    ),
    "pair.tp-indivisible": Entry(
        _ERROR,
        "The attention TP sizes (tp / dp) of prefill and decode do not divide each other: KV heads "
        "cannot be mapped.",
        "choose --tp and --dp so that one side's tp/dp divides the other's",
    ),
    "pair.tp-differs": Entry(
        _NOTE,
        "Prefill and decode have different attention TP sizes (tp / dp). With MLA (DeepSeek) that "
        "costs nothing; other models pay for cutting up the KV cache at every transfer.",
        "with models without MLA choose the same tp/dp on both sides",
    ),
    "pair.context": Entry(
        _WARNING,
        "Prefill takes longer prompts than decode: those are computed and then refused.",
        "the same --context-length on both sides, and enough KV memory on decode",
    ),
    # Latency ---------------------------------------------------------------------------------
    "latency.ok": Entry(_OK, "Round trips are short against a forward pass."),
    "latency.high": Entry(
        _WARNING,
        "Even the fastest of several round trips is long. SBS measures and adds it (L_net), but "
        "decides that much earlier on what it knows.",
        "run the router in the same network as the engines; mind proxies between them",
    ),
    "latency.jitter": Entry(
        _NOTE,
        "Some round trips take much longer than others: a busy HTTP server, garbage collection in "
        "the engine, or a shared network.",
        "after start-up POST /freeze_gc to each engine (SGLang does so itself unless "
        "--skip-server-warmup is set)",
    ),
    "latency.clock": Entry(
        _NOTE,
        "The engine's clock is off from this machine's. SBS does not use it (reports carry spans "
        "of time), but logs cannot be compared.",
        "run NTP or chrony on the engine's machine",
    ),
    # Bootstrap -------------------------------------------------------------------------------
    "bootstrap.ok": Entry(_OK, "The bootstrap server answers, and all prefill ranks are known."),
    "bootstrap.unreachable": Entry(
        _ERROR,
        "The bootstrap server of this prefill engine cannot be reached: decode engines get no KV "
        "cache from it.",
        "give the port of --disaggregation-bootstrap-port behind the URL of --prefill, and open it "
        "for the decode engines",
    ),
    "bootstrap.wrong-port": Entry(
        _ERROR,
        "The bootstrap port given is not the engine's.",
        "write the engine's own port behind --prefill URL, or leave it out",
    ),
    "bootstrap.not-one": Entry(
        _ERROR,
        "What answers at the bootstrap port is no bootstrap server.",
        "give the port of --disaggregation-bootstrap-port, not of HTTP, behind --prefill URL",
    ),
    "bootstrap.other-engine": Entry(
        _ERROR,
        "The bootstrap server is another engine's: decode would wait for KV cache that never "
        "comes.",
        "give each --prefill its own bootstrap port; engines on one host need different ones",
    ),
    "bootstrap.registering": Entry(
        _ERROR,
        "Not all ranks of the prefill engine have registered with its bootstrap server.",
        "look for the missing ranks in the engine's log; do all nodes run?",
    ),
    "bootstrap.loopback": Entry(
        _ERROR,
        "Decode engines are told the host of the prefill URL, and this one means themselves to "
        "them.",
        "write prefill URLs with the address by which decode engines reach them, not localhost",
    ),
    # Cache -----------------------------------------------------------------------------------
    "cache.exact": Entry(_OK, "KV events tell the router what every rank has cached, to the page."),
    "cache.approximate": Entry(
        _NOTE,
        "No KV events: the router estimates what is cached from what it sent where.",
        'start prefill engines with --page-size 64 --kv-events-config \'{"publisher": "zmq", '
        '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\'',
    ),
    "cache.off": Entry(
        _NOTE,
        "The radix cache is off: no prompt finds what earlier ones left.",
        "leave --disable-radix-cache out",
    ),
    "cache.unusable": Entry(
        _WARNING,
        "KV events are published, but not so that they can be subscribed to.",
        "correct --kv-events-config: an endpoint tcp://*:PORT, and a replay_endpoint whose port is "
        "higher by the DP size at least",
    ),
    "cache.unreachable": Entry(
        _WARNING,
        "Ports of KV events refuse connections from here.",
        "open them for the router on the node that is named: from the endpoint's port on and from "
        "the replay endpoint's on, one per DP rank; let the endpoint listen (tcp://*:PORT)",
    ),
    "cache.other-nodes": Entry(
        _WARNING,
        "DP ranks on other nodes than the engine's first do not say where their KV events are, or "
        "name an address that is not believed: the router estimates what they have cached.",
        "the same release of the plugin on every node; SGLANG_SBS_NODE_HOST there if its messages "
        "come from another address than routers reach it by (then with a key)",
    ),
    "cache.no-replay": Entry(
        _NOTE,
        "Without a replay endpoint a router that starts later, or misses an event, learns the "
        "cache only from new blocks.",
        'add "replay_endpoint": "tcp://*:5657" to --kv-events-config',
    ),
    "cache.small-pages": Entry(
        _NOTE,
        "Pages of few tokens make many KV events, which cost more than they save.",
        "start prefill and decode with --page-size 16 or more",
    ),
    "cache.mixed": Entry(
        _WARNING,
        "Some prefill engines publish KV events and others do not: what is exactly known is "
        "weighed against estimates.",
        "the same --kv-events-config on all prefill engines",
    ),
    # Room ------------------------------------------------------------------------------------
    "room.ok": Entry(_OK, "Decode has room for more requests."),
    "room.kv-full": Entry(
        _WARNING,
        "KV memory of a decode rank is nearly full: requests wait there or are retracted.",
        "add decode instances or memory (--mem-fraction-static), or send less",
    ),
    "room.slots-full": Entry(
        _WARNING,
        "A decode rank runs nearly as many requests as it may.",
        "raise --max-running-requests, add decode instances, or send less",
    ),
    "room.unknown": Entry(
        _NOTE,
        "The engine does not tell its load (/v1/loads) for every rank.",
        "nothing; SGLang 0.5.14 and later do",
    ),
    # Security --------------------------------------------------------------------------------
    "security.ok": Entry(_OK, "Keys are accepted where they are wanted."),
    "security.key-refused": Entry(
        _ERROR,
        "The engine refuses the API key given, or wants one and none is given.",
        "give the engine's --api-key as --api-key to the router (and to this doctor)",
    ),
    "security.key-unneeded": Entry(
        _WARNING,
        "A key is given and the engine answers without one: whoever reaches its port can use it.",
        "start the engine with --api-key",
    ),
    "security.no-key": Entry(
        _NOTE,
        "Engines take requests from whoever reaches their ports.",
        "keep the ports inside the cluster, or start engines and router with --api-key",
    ),
    "security.admin-key": Entry(
        _ERROR,
        "The engine has an admin key, and it is not the one given: it refuses the router's aborts, "
        "so that requests of clients that left go on.",
        "give the engine's --admin-api-key as --admin-api-key to the router",
    ),
    "security.admin-key-shown": Entry(
        _WARNING,
        "With an admin key and no API key, SGLang shows the admin key to whoever asks for "
        "/server_info.",
        "start the engine with --api-key too",
    ),
    "security.plain-key": Entry(
        _WARNING,
        "The key goes over the network unencrypted.",
        "start engines with --ssl-certfile and --ssl-keyfile and give https:// URLs",
    ),
    "security.endforward-open": Entry(
        _NOTE,
        "EndForward goes over the network unencrypted and is taken from whoever reaches the port.",
        "share a secret: --sbs-endforward-key-file FILE here, SGLANG_SBS_KEY_FILE=FILE on engines",
    ),
    "security.key-file-mode": Entry(
        _WARNING,
        "Other users of this machine can read the secret.",
        "chmod 600 the file",
    ),
    # Router ----------------------------------------------------------------------------------
    "router.ok": Entry(_OK, "The router is ready and knows the engines as they are."),
    "router.unreachable": Entry(
        _ERROR,
        "The router does not answer.",
        "check --router: the URL of the router's --host and --port, with its scheme",
    ),
    "router.not-ours": Entry(
        _WARNING,
        "What answers is no sglang-sbs router: it does not know EndForward.",
        "give the URL of python -m sglang_sbs.launch_router",
    ),
    "router.key": Entry(
        _ERROR,
        "The router refuses the key given for its control plane.",
        "give --admin-api-key (or a control plane key with the role admin, or --api-key)",
    ),
    "router.not-ready": Entry(
        _ERROR,
        "The router has no healthy pair of prefill and decode, or is shutting down.",
        "see the findings of its workers",
    ),
    "router.worker-missing": Entry(
        _WARNING,
        "The router does not know this engine.",
        "add it to the router's flags, or POST /workers",
    ),
    "router.worker-extra": Entry(
        _NOTE,
        "The router has a worker that was not given here: not examined.",
        "give it too, or give --router alone to examine all",
    ),
    "router.worker-down": Entry(
        _ERROR,
        "The router does not send requests to this engine.",
        "see its other findings; the router's log says since when",
    ),
    "router.problem": Entry(
        _WARNING,
        "The router reports a problem with this engine.",
        "as the router says; docs/router.md has its messages",
    ),
    "router.polls": Entry(
        _WARNING,
        "The router hears no EndForward of this engine lately and goes by load polls.",
        "see the findings on the plugin and EndForward",
    ),
    "router.throttled": Entry(
        _WARNING,
        "Flow control is refusing requests (429): more arrives than the cluster can prefill.",
        "add prefill instances; sglang-sbs simulate plan says how many",
    ),
    # Probe -----------------------------------------------------------------------------------
    "probe.ok": Entry(_OK, "A request through this pair generated its token."),
    "probe.failed": Entry(
        _ERROR,
        "A request through this pair failed.",
        "look at the first error in the logs of both engines; the message names the side",
    ),
}
