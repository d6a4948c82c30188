/* Threads of torch's own pool: the OpenMP that its library has loaded, found by the address of its functions.

   A second pool would fight with torch's for the cores, as both wait in loops for what comes next. Where the functions
   aren't found (another OpenMP than GNU's), all runs on the thread that asks, and products on the library's threads.
   A child of fork() has no pool: it stays on one thread, as torch's own calls would wait for ever. */

#include "_native.h"

#ifndef _WIN32
#include <pthread.h>
#endif

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void), (*thread_count)(void), (*set_library_threads)(int);
static int forked;

#ifndef _WIN32
static void in_child(void)
{
    forked = 1;
}
#endif

void set_threads(void *run, void *number, void *count, void *library_threads)
{
    static int watched;
    memcpy(&parallel, &run, sizeof parallel);
    memcpy(&thread_number, &number, sizeof number);
    memcpy(&thread_count, &count, sizeof count);
    memcpy(&set_library_threads, &library_threads, sizeof library_threads);
    if (!number || !count)
        parallel = NULL;
#ifndef _WIN32
    if (!watched)
        watched = pthread_atfork(NULL, NULL, in_child) == 0;
    if (!watched)
        parallel = NULL;
#endif
}

/* How many threads may be used of those that were asked for. */
int64_t usable_threads(int64_t threads)
{
    return parallel && !forked && threads > 1 ? (threads < 1024 ? threads : 1024) : 1;
}

typedef struct {
    Part part;
    void *job;
} Team;

static void member(void *data)
{
    const Team *team = data;
    team->part(team->job, thread_number(), thread_count());
}

/* Call `part` once on each thread; there may be fewer of them than asked for. */
void in_parallel(int64_t threads, Part part, void *job)
{
    Team team = {part, job};
    if (threads < 2 || !parallel)
        part(job, 0, 1);
    else
        parallel(member, &team, (unsigned)threads, 0);
}

/* From here on the library's products run on the thread that calls them. What was before, -1 where nothing changed. */
int products_alone(int64_t threads)
{
    return parallel && threads > 1 && set_library_threads ? set_library_threads(1) : -1;
}

void products_as_before(int before)
{
    if (before >= 0)
        set_library_threads(before);
}
