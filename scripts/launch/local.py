"""The points of a sweep as processes of this machine."""

import os
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait

from scripts.launch import points

STOPPED = (143, -2, 130)  # by a signal that was for the sweep too
EVERY = 60  # seconds between two lines of each run


def run(todo, jobs):
    """-> workdirs of the points that failed. SystemExit where the sweep itself was asked to stop."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = queue.SimpleQueue()
    for job in range(jobs):
        shares.put(cores[job::jobs])
    live = {}

    def one(number, point):
        told = f"[{number}/{len(todo)}] {point.workdir}"
        print(f"{told}: {points.progress(point.workdir)}", flush=True)
        if points.finished(point.workdir):
            return 0
        command = [sys.executable, *point.command]
        if jobs == 1:
            return subprocess.run(command, check=False).returncode
        share, log = shares.get(), point.workdir.with_name(f"{point.workdir.name}.log")
        log.parent.mkdir(exist_ok=True)
        if share:
            os.sched_setaffinity(0, share)  # of this thread, and of what it starts
        live[number] = told, point.workdir
        with log.open("a") as out:
            code = subprocess.run(command, check=False, stdout=out, stderr=out).returncode
        del live[number]
        shares.put(share)
        told += f": {points.progress(point.workdir)}"
        print(told + (f", exit code {code}, see {log}" if code else ""), flush=True)
        return code

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, number, point) for number, point in enumerate(todo, 1)]
        codes = []
        for future in waiting:
            while wait([future], EVERY).not_done:
                for told, workdir in list(live.values()):
                    print(f"{told}: {points.progress(workdir)}", flush=True)
            codes.append(future.result())
            if codes[-1] in STOPPED:
                pool.shutdown(cancel_futures=True)
                sys.exit(codes[-1])
    return [point.workdir for point, code in zip(todo, codes, strict=True) if code]
