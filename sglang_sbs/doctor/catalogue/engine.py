"""Findings about single engines: reach, versions, plugin, EndForward, limits, flags.

Ids are stable: tools may rely on them.
"""

from __future__ import annotations

from sglang_sbs.doctor.catalogue.entry import Entry, Severity

_OK, _NOTE, _WARNING, _ERROR = Severity

_CHUNK = (
    "SGLang divides --chunked-prefill-size by the DP size: for N tokens per rank start the engine "
    "with --chunked-prefill-size N x DP"
)

ENTRIES: dict[str, Entry] = {
    # Reaching the engines --------------------------------------------------------------------
    "reach.ok": Entry(_OK, "The engine answers, and is ready."),
    "reach.unreachable": Entry(
        _ERROR,
        "No connection: nothing listens there, the name does not resolve, or a firewall drops it.",
        "check that the engine runs, and the host and port of this URL (its --host and --port)",
    ),
    "reach.silent": Entry(
        _ERROR,
        "It takes connections and does not answer: stopped, overloaded, or a scheduler that hangs. "
        "/server_info is answered between two passes.",
        "look at the engine's log; raise --timeout if a forward pass takes that long",
    ),
    "reach.wrong-scheme": Entry(
        _ERROR,
        "The engine speaks HTTPS where http:// is given, or the other way round.",
        "write the URL with the other scheme",
    ),
    "reach.certificate": Entry(
        _ERROR,
        "The engine's certificate is not trusted here, or it wants a client certificate.",
        "give --ca-cert-paths FILE (and --client-cert-path, --client-key-path), as to the router",
    ),
    "reach.not-sglang": Entry(
        _ERROR,
        "Something answers that is no SGLang engine.",
        "give the URL of an engine's --port; not of its bootstrap, metrics or other port",
    ),
    "reach.is-a-router": Entry(
        _ERROR,
        "The URL is a router's.",
        "give it with --router, and the engines' own URLs with --prefill and --decode",
    ),
    "reach.wrong-role": Entry(
        _ERROR,
        "The engine runs in another disaggregation mode than it is given as.",
        "list it under the other flag, or relaunch it with the other --disaggregation-mode",
    ),
    "reach.unusable": Entry(
        _ERROR,
        "What the engine says of itself cannot be.",
        "look at its /server_info; is that an unmodified SGLang?",
    ),
    "reach.rank-server": Entry(
        _ERROR,
        "With SGLang's Rust server (SGLANG_RUST_SERVER=1) each DP rank serves HTTP itself, at "
        "--port plus its number. Requests for one of the ranks would go astray, so a router sends "
        "this engine nothing.",
        "give the address of DP rank 0 and open the ports behind it, or start the engine without "
        "SGLANG_RUST_SERVER",
    ),
    "reach.not-ready": Entry(
        _ERROR,
        "The engine runs and refuses requests: still loading, paused, or a weight update.",
        "wait for it, or continue generation (POST /continue_generation)",
    ),
    "reach.same-engine": Entry(
        _ERROR,
        "Two URLs lead to one engine: the router would count its capacity twice.",
        "give every engine once",
    ),
    "reach.no-pair": Entry(
        _ERROR,
        "There is no usable prefill or no usable decode engine: no request can be served.",
        "give at least one working --prefill and one working --decode",
    ),
    # Versions --------------------------------------------------------------------------------
    "version.ok": Entry(_OK, "All engines run one SGLang release that the plugin supports."),
    "version.too-old": Entry(
        _ERROR,
        "The router cannot use this SGLang release.",
        "upgrade the engine",
    ),
    "version.needs-patch": Entry(
        _WARNING,
        "This SGLang has no plugin framework (it begins with 0.5.11), so that "
        "sglang-sbs installed beside it alone sends no EndForward.",
        "on the engine's machine: sglang-sbs patch apply, then restart it; or upgrade SGLang",
    ),
    "version.coupled": Entry(
        _WARNING,
        "Before SGLang 0.5.10 the prefill rank of a request decides which decode ranks are left.",
        "upgrade the engine to 0.5.10 or later if you can",
    ),
    "version.mixed": Entry(
        _WARNING,
        "Engines run different SGLang releases. Prefill and decode exchange internal structures "
        "that change between releases.",
        "run one release everywhere",
    ),
    "version.mixed-plugin": Entry(
        _WARNING,
        "Engines run different sglang-sbs releases, or another one than this doctor (and router).",
        "install the same sglang-sbs on all engines and routers",
    ),
    "version.wire": Entry(
        _ERROR,
        "The plugin speaks another version of the EndForward message than this release reads.",
        "install the same sglang-sbs on engines and routers",
    ),
    "version.mixed-kernel": Entry(
        _WARNING,
        "Engines run different sgl-kernel releases: speed, and in the last digits results, differ.",
        "pip install the same sgl-kernel on all engines",
    ),
    "version.unknown": Entry(
        _NOTE,
        "A build from source without a release number: taken to be recent.",
        "nothing; make sure that it is newer than 0.5.11",
    ),
    # Plugin ----------------------------------------------------------------------------------
    "plugin.ok": Entry(_OK, "The plugin is loaded and says where it speaks."),
    "plugin.absent": Entry(
        _WARNING,
        "The plugin is not installed in this engine's Python, or not configured. SBS then falls "
        "back to load polls and the engine's own answers: coarser.",
        "install sglang-sbs next to SGLang (pip install . in a checkout of it), set "
        "SGLANG_SBS_ROUTERS=tcp://ROUTER:7600, restart (and have sglang_sbs in "
        "SGLANG_PLUGINS if that is set)",
    ),
    "plugin.unknown": Entry(
        _NOTE,
        "This SGLang release does not show plugins in /server_info, and EndForward could not be "
        "listened to: nobody can tell whether it is loaded.",
        "run the doctor on the router's machine while no router runs, or give --router",
    ),
    "plugin.routers-differ": Entry(
        _WARNING,
        "Engines report to different routers: each router sees only a part of the cluster.",
        "set the same SGLANG_SBS_ROUTERS on all engines; it takes several, separated by commas",
    ),
    "plugin.instance-id": Entry(
        _ERROR,
        "SGLANG_SBS_INSTANCE_ID is the same on several engines: their reports cannot be told "
        "apart.",
        "set it to each engine's own URL as given to the router, or unset it",
    ),
    "plugin.instance-id-unknown": Entry(
        _NOTE,
        "SGLANG_SBS_INSTANCE_ID is not the URL given here. The router goes by the request ids that "
        "ranks echo, so that reports count from the first request on.",
        "set it to the URL given to the router, or unset it",
    ),
    "plugin.errors": Entry(
        _WARNING,
        "The plugin had errors inside the engine; after 20 it switches itself off.",
        "look for 'sglang_sbs' in the engine's log and report what it says",
    ),
    # EndForward ------------------------------------------------------------------------------
    "endforward.ok": Entry(_OK, "Every DP rank reports, and lately."),
    "endforward.silent": Entry(
        _ERROR,
        "The plugin is loaded and nothing arrives from any rank of this engine.",
        "let SGLANG_SBS_ROUTERS name an address of the router that this engine's machine reaches "
        "(port 7600 unless --sbs-endforward-bind says otherwise), and let SGLANG_SBS_KEY_FILE "
        "there and --sbs-endforward-key-file here be the same secret, or both unset",
    ),
    "endforward.rank-missing": Entry(
        _ERROR,
        "Some DP ranks of this engine report and others do not.",
        "give every node of a multi-node engine the plugin and the same SGLANG_SBS_ROUTERS; look "
        "for 'sglang_sbs' in the log of the missing ranks",
    ),
    "endforward.stale": Entry(
        _WARNING,
        "The last report of a rank is old; heartbeats come every second.",
        "look whether the engine hangs, and at the network between it and the router",
    ),
    "endforward.key": Entry(
        _ERROR,
        "Publishers connected and failed the handshake: one side has a key and the other has none "
        "or another one.",
        "the same file in SGLANG_SBS_KEY_FILE of all engines and --sbs-endforward-key-file of the "
        "router (openssl rand -hex 32 > FILE), or neither",
    ),
    "endforward.mismatch": Entry(
        _ERROR,
        "Reports say another role or DP size than /server_info: they belong to another engine.",
        "set SGLANG_SBS_INSTANCE_ID to each engine's own URL, or unset it",
    ),
    "endforward.malformed": Entry(
        _WARNING,
        "Messages arrive that are no EndForward: another program talks to this port, or another "
        "release of the plugin.",
        "keep the port inside the cluster; use keys (--sbs-endforward-key-file)",
    ),
    "endforward.stranger": Entry(
        _WARNING,
        "Ranks report that belong to none of the engines given.",
        "give all engines of the cluster; if they are another cluster's, correct "
        "SGLANG_SBS_ROUTERS there",
    ),
    "endforward.unattributed": Entry(
        _NOTE,
        "Reports arrive that cannot be told apart between engines: their SGLang does not show the "
        "plugin in /server_info. A router finds out by the requests it sends.",
        "set SGLANG_SBS_INSTANCE_ID to each engine's URL",
    ),
    "endforward.port-busy": Entry(
        _NOTE,
        "Something listens already where engines report to, a router presumably: the doctor cannot "
        "listen there too.",
        "give --router URL, so that the router is asked what arrives",
    ),
    "endforward.elsewhere": Entry(
        _NOTE,
        "The engine reports to addresses that are not this machine's: not checked.",
        "run the doctor on the router's machine, give --router URL, or say where to listen: "
        "--sbs-endforward-bind tcp://0.0.0.0:7600",
    ),
    "endforward.cannot-listen": Entry(
        _WARNING,
        "The endpoint to listen at cannot be bound.",
        "give another --sbs-endforward-bind",
    ),
    # Limits ----------------------------------------------------------------------------------
    "limits.ok": Entry(_OK, "DP size, chunk and limits are such that SBS has something to do."),
    "limits.dp-one": Entry(
        _WARNING,
        "A prefill engine with one DP rank: SBS can choose when, but not the rank within a batch.",
        "start prefill engines with --dp N --enable-dp-attention, N > 1",
    ),
    "limits.no-dp-attention": Entry(
        _WARNING,
        "Several DP ranks without DP attention are independent replicas: nothing is gained by "
        "batching them into one pass.",
        "add --enable-dp-attention",
    ),
    "limits.no-barrier": Entry(
        _NOTE,
        "The DP ranks make passes each for itself. SBS takes each for an instance of one rank: it "
        "gains by the predicted finish of each rank and by the order of the queue; batches over "
        "ranks, and holding for them, gain nothing.",
        "nothing, if that is wanted: SBS needs no setting for it",
    ),
    "limits.no-chunking": Entry(
        _WARNING,
        "Chunked prefill is off: a pass is as long as the longest prompt in it, and its end can "
        "hardly be foretold.",
        "set --chunked-prefill-size (N tokens per rank x DP size)",
    ),
    "limits.chunk-small": Entry(
        _WARNING,
        "Few tokens per rank and pass: fixed costs and stragglers outweigh the work.",
        _CHUNK,
    ),
    "limits.chunk-page": Entry(
        _NOTE,
        "The chunk per rank is no multiple of the page size: every chunked prompt wastes a bit.",
        "choose --chunked-prefill-size as a multiple of page size x DP size",
    ),
    "limits.max-prefill-tokens": Entry(
        _WARNING,
        "--max-prefill-tokens is below the chunk per rank, and ends passes before they are full.",
        "raise --max-prefill-tokens to the chunk per rank at least; SGLang does not divide it",
    ),
    "limits.few-running": Entry(
        _WARNING,
        "Few requests may be on a rank at once: passes and decode batches stay small.",
        "raise --max-running-requests; SGLang divides it by the DP size",
    ),
    "limits.uneven": Entry(
        _WARNING,
        "Instances of one role differ in DP size, chunk, page size or limits. SBS goes by each "
        "one's own, but the smaller ones are late or full first.",
        "start all instances of a role with the same flags",
    ),
    # Flags -----------------------------------------------------------------------------------
    "flags.ok": Entry(_OK, "No flag gets in the way of SBS."),
    "flags.load-balance": Entry(
        _WARNING,
        "The router names every request's rank by its room. With another method SGLang (before "
        "0.5.16) registers each rank over HTTP within the scheduler, between two passes, and "
        "whatever does not come through the router is placed by it.",
        "leave --load-balance-method out (auto), or write follow_bootstrap_room",
    ),
    "flags.decode-ranks": Entry(
        _WARNING,
        "With this method a decode engine before SGLang 0.5.10 chooses its DP ranks itself: the "
        "router's choice has no effect.",
        "--load-balance-method follow_bootstrap_room (before 0.5.8: round_robin) on decode",
    ),
    "flags.prefill-delayer": Entry(
        _WARNING,
        "--enable-prefill-delayer holds requests back in the engine, while SBS has just timed "
        "them: two hands on one wheel.",
        "start prefill engines without --enable-prefill-delayer",
    ),
    "flags.prefill-delayer-queue": Entry(
        _NOTE,
        "The queue trigger of the prefill delayer compares what waits with what runs, and nothing "
        "runs on a prefill engine of a PD cluster: it delays nothing there.",
        "start prefill engines without --prefill-delayer-queue-min-ratio and "
        "--prefill-delayer-max-delay-ms",
    ),
    "flags.min-free-slots-delay": Entry(
        _NOTE,
        "--min-free-slots-delay waits for running requests to end, and nothing runs on a prefill "
        "engine of a PD cluster: it delays nothing there.",
        "start prefill engines without --min-free-slots-delay",
    ),
    "flags.sleep-on-idle": Entry(
        _WARNING,
        "Under DP attention --sleep-on-idle costs one to two seconds of TTFT after idle times: "
        "ranks wake up one by one, and none can begin alone.",
        "start engines without --sleep-on-idle",
    ),
    "flags.rust-idle": Entry(
        _WARNING,
        "With SGLang's Rust server an idle DP rank sleeps up to a second, and the others wait for "
        "it before they begin a request. The plugin makes that a millisecond.",
        "install the plugin next to SGLang and set SGLANG_SBS_ROUTERS",
    ),
    "flags.overlap-disabled": Entry(
        _NOTE,
        "Without overlap scheduling the GPU waits for the CPU between two passes.",
        "leave --disable-overlap-schedule out unless a feature needs it",
    ),
    "flags.schedule-policy": Entry(
        _NOTE,
        "The engine reorders its queue. SBS sends batches that fit a pass and foretells passes as "
        "first come first served: what a pass leaves over runs at other times than foretold.",
        "leave --schedule-policy at fcfs on prefill engines",
    ),
    "flags.pipeline": Entry(
        _NOTE,
        "With pipeline parallelism several passes are under way at once, and their ends foretell "
        "the next one less well.",
        "prefer tensor and data parallelism on prefill engines where memory allows",
    ),
    "flags.role-switch": Entry(
        _NOTE,
        "--enable-pd-role-switch: the engine may change its role while a router runs.",
        "after a switch, give the router the engine under its new role (DELETE and POST /workers)",
    ),
}
