"""A PD cluster on this machine: planned, started, watched, stopped.

| module | owns |
|---|---|
| `plan` | from options to the exact command line, environment and ports of every process |
| `ports` | finding free ports |
| `spawn` | starting a process: as a child, or forked from the CPU engines' nursery |
| `logs` | the last lines of a log |
| `supervise` | the set of processes: death watch, logs, stopping exactly what was started |
| `readiness` | when a process serves requests |
| `progress` | the display of a start |
| `local` | `LocalCluster`, all of it as one async context manager |

Knows SGLang's command line and HTTP interface only; imports neither torch nor SGLang.
"""
