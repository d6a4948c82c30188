/* Threads of torch's own pool: the OpenMP that its library has loaded, found by the address of its functions.

   A second pool would fight with torch's for the cores, as both wait in loops for what comes next. Where the functions
   aren't found (another OpenMP than GNU's), all runs on the thread that asks, and products on the library's threads.
   A child of fork() has no pool: it stays on one thread, as torch's own calls would wait for ever. */

#include "_native.h"

#include <time.h>
#ifndef _WIN32
#include <pthread.h>
#endif

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void), (*thread_count)(void), (*set_library_threads)(int);
static int forked;

/* Where other processes want the cores, a region waits for threads that don't run, for longer than all of it takes one
   thread. Seconds of this thread's latest regions, worked and waited; how many of the next ones it does alone. */
static _Thread_local struct {
    double worked, waited;
    int alone;
} latest;
static const double LATEST = 0.05;
enum { ALONE = 1000 };

#ifndef _WIN32
static void in_child(void)
{
    forked = 1;
}
#endif

void set_threads(void *run, void *number, void *count, void *library_threads)
{
    static int watched;
    memset(&latest, 0, sizeof latest);
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
    double done; /* when the first thread had done its part */
} Team;

static double now(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void member(void *data)
{
    Team *team = data;
    int number = thread_number();
    team->part(team->job, number, thread_count());
    if (!number)
        team->done = now();
}

/* Call `part` once on each thread; there may be fewer of them than asked for. */
void in_parallel(int64_t threads, Part part, void *job)
{
    if (threads < 2 || !parallel || latest.alone) {
        latest.alone -= latest.alone > 0;
        part(job, 0, 1);
        return;
    }
    double begin = now();
    Team team = {part, job, begin};
    parallel(member, &team, (unsigned)threads, 0);
    latest.worked += team.done - begin;
    latest.waited += now() - team.done;
    if (latest.worked + latest.waited > LATEST) {
        latest.alone = latest.waited > (double)(threads - 1) * latest.worked ? ALONE : 0;
        latest.worked = latest.waited = 0;
    }
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
