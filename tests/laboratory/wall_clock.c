/* Preloaded into a process, moves its wall clock by the seconds that the file WALL_CLOCK holds, and nothing else.
 * libfaketime also takes over timed waits, and gets those on the monotonic clock wrong when the wall clock jumps:
 * Python's threads then spin, or time.sleep() fails. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t nowhere = 0;
static const volatile int64_t *offset = &nowhere;

__attribute__((constructor)) static void open_file(void)
{
    const char *path = getenv("WALL_CLOCK");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI))
        now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    if (result)
        *result = exact.tv_sec;
    return exact.tv_sec;
}
