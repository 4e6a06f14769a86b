/* Threads that wait for calls, and work on each together with its caller.

   `begin_call` returns at once: the workers begin while the caller does something else. By
   `help_call` and `end_call` the caller works with them. A caller who finds no workers, or none that
   are free, does it all. */
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "team.h"

#define LOOKS_BEFORE_SLEEPING 16384 /* some 200 us, which a caller may take from step to step */

typedef void walk_function(const void *what, struct member *member);

struct call {
    struct call *next;
    walk_function *walk;
    const void *what;
    struct team team;
    unsigned generation; /* of the workers, when it began */
    int joined;          /* members so far; under the lock. A quick worker may join again as another */
    atomic_int inside;   /* workers, of whom a late one may only be looking for jobs */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t posted;
    unsigned generation; /* one more in each fork */
    int num, sleeping;
    struct call *first; /* calls under way, in their order */
    atomic_uint num_posted;
} workers = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, NULL, 0};

/* Under the lock. A call that wants another worker, or NULL. */
static struct call *call_to_join(void) {
    struct call *call = workers.first;
    while (call && call->joined >= call->team.size) call = call->next;
    return call;
}

static void *work(void *nothing) {
    (void)nothing;
    pthread_mutex_lock(&workers.lock);
    for (;;) {
        struct call *call = call_to_join();
        if (call) {
            struct member member = {&call->team, call->joined++, 0};
            atomic_fetch_add(&call->inside, 1);
            pthread_mutex_unlock(&workers.lock);
            call->walk(call->what, &member);
            atomic_fetch_sub(&call->inside, 1); /* from here on the call may be gone */
            pthread_mutex_lock(&workers.lock);
            continue;
        }
        unsigned seen = atomic_load(&workers.num_posted);
        pthread_mutex_unlock(&workers.lock);
        for (int looks = 0; looks < LOOKS_BEFORE_SLEEPING;) {
            if (atomic_load_explicit(&workers.num_posted, memory_order_relaxed) != seen) break;
            pause_a_little(&looks);
        }
        pthread_mutex_lock(&workers.lock);
        if (atomic_load(&workers.num_posted) == seen) {
            workers.sleeping++;
            pthread_cond_wait(&workers.posted, &workers.lock);
            workers.sleeping--;
        }
    }
    return NULL;
}

/* Under the lock. Signals are the process's other threads' business, but for a fault's, which whoever
   prints a traceback wants to see. */
static void hire(int wanted) {
    sigset_t all, before;
    pthread_attr_t attributes;
    if (workers.num >= wanted || pthread_attr_init(&attributes)) return;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV), sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (workers.num < wanted && !pthread_create(&thread, &attributes, work, NULL)) workers.num++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* In the child of a fork none of the threads is there, and nobody ends a call that was under way. */
static void begin_anew(void) {
    pthread_mutex_init(&workers.lock, NULL);
    pthread_cond_init(&workers.posted, NULL);
    workers.num = workers.sleeping = 0, workers.first = NULL;
    workers.generation++;
}

static void mind_forks(void) { pthread_atfork(NULL, NULL, begin_anew); }

/* `stages` are zeros. */
static void begin_call(struct call *call, walk_function *walk, const void *what, int size,
                       struct stage *stages) {
    *call = (struct call){.walk = walk, .what = what, .team = {size, stages, 0}, .joined = 1};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, mind_forks);
    pthread_mutex_lock(&workers.lock);
    call->generation = workers.generation;
    hire(size - 1);
    struct call **end = &workers.first;
    while (*end) end = &(*end)->next;
    *end = call;
    atomic_fetch_add(&workers.num_posted, 1);
    if (workers.sleeping) pthread_cond_broadcast(&workers.posted);
    pthread_mutex_unlock(&workers.lock);
}

/* The caller joins the others wherever they are, and leaves as early as the work has it. */
static void help_call(struct call *call) {
    if (call->generation != workers.generation) return;
    struct member caller = {.team = &call->team, .leaves_early = 1};
    call->walk(call->what, &caller);
}

/* The caller works with the others to the end. Whether it came to that: in the child of a fork a call
   of the parent's never does. */
static int end_call(struct call *call) {
    if (call->generation != workers.generation) return 0;
    struct member caller = {.team = &call->team};
    call->walk(call->what, &caller);
    pthread_mutex_lock(&workers.lock);
    struct call **place = &workers.first;
    while (*place != call) place = &(*place)->next;
    *place = call->next;
    pthread_mutex_unlock(&workers.lock);
    for (int looks = 0; atomic_load(&call->inside);) pause_a_little(&looks);
    return 1;
}
