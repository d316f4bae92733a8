"""Where the words of memory are that the code of threads and its caller share: offsets in bytes of 64-bit integers."""

# A job is an array of words: these, and then the kernel's own arguments.
# `CALL_NEXT` is the address of the job that follows, or 0. The job's items are `CALL_FIRST` to `CALL_ITEMS` - 1.
CALL_NEXT, CALL_POOL, CALL_KERNEL, CALL_FIRST, CALL_ITEMS, CALL_LEAST, CALL_THREADS, CALL_MEMORY, CALL_STRIDE = (
    8 * i for i in range(9)
)
CALL_ARGS = 72
# A thread, the caller or a worker. Words that different threads write are a cache line apart.
ASLEEP, POOL, INDEX, SEMAPHORE, TIME, SEMAPHORE_AT, WORKER_BYTES = 0, 64, 72, 80, 96, 128, 256
# The pool: first the words of the caller, then these, then those of the workers.
LEFT, DONE, LOCK = 256, 320, 384
JOB, LEAST, WAIT, POST, CLOCK, WALL, CPU, USEFUL = (448 + 8 * i for i in range(8))
# How well threads worked: `judge` of the threads' code.
BEGAN, ENDED, RAN, SLEPT, WORK, SPENT, PERCENT, FEWER, UNTIL, HOLD, STRIKES = (512 + 8 * i for i in range(11))
WORKERS = 1024
