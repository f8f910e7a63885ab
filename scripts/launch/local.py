"""The points of a sweep as processes of this machine."""

import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait

from scripts.launch import points

STOPPED = (143, -2, 130)  # by a signal that was for the sweep too
EVERY = 60  # seconds between two lines of each run


def run(todo, jobs):
    """-> workdirs of the points that failed. SystemExit where the sweep itself was asked to stop: what runs had the
    same signal and ends by itself, nothing else is started."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = queue.SimpleQueue()
    for job in range(jobs):
        shares.put(cores[job::jobs])
    live, stop = {}, threading.Event()

    def start(*given, **options):
        code = subprocess.run(*given, check=False, **options).returncode
        if code in STOPPED:
            stop.set()  # before this thread takes its next point
        return code

    def one(number, point):
        if stop.is_set():
            return 0
        told = f"[{number}/{len(todo)}] {point.workdir}"
        print(f"{told}: {points.progress(point.workdir)}", flush=True)
        if points.finished(point.workdir):
            return 0
        command = [sys.executable, *point.command]
        if jobs == 1:
            return start(command)
        share, log = shares.get(), point.workdir.with_name(f"{point.workdir.name}.log")
        log.parent.mkdir(exist_ok=True)
        if share:
            os.sched_setaffinity(0, share)  # of this thread, and of what it starts
        live[number] = told, point.workdir
        with log.open("a") as out:
            code = start(command, stdout=out, stderr=out)
        del live[number]
        shares.put(share)
        told += f": {points.progress(point.workdir)}"
        print(told + (f", exit code {code}, see {log}" if code else ""), flush=True)
        return code

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, number, point) for number, point in enumerate(todo, 1)]
        codes = []
        try:
            for future in waiting:
                while wait([future], EVERY).not_done:
                    for told, workdir in list(live.values()):
                        print(f"{told}: {points.progress(workdir)}", flush=True)
                codes.append(future.result())
                if codes[-1] in STOPPED:
                    sys.exit(codes[-1])
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            stop.set()
    return [point.workdir for point, code in zip(todo, codes, strict=True) if code]
