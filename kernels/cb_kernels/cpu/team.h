/* Threads that compute one thing together: those of an OpenMP region, or a caller and the workers of
   workers.c, of whom any may come late or be held up.

   Every member walks through the same stages in the same order. A stage is cut into jobs: a member
   takes one after the other that nobody has yet, and goes on when all of them are done. So a stage
   waits for nobody but who has taken a job of it. */
#pragma once

#include <sched.h>
#include <stdatomic.h>

#include "vectors.h"

#define LOOKS_BEFORE_YIELDING 4096 /* some 70 us: whom it waits for may need this core */
#define STREAM_BYTES (1 << 20)     /* of a weight that is read from memory by one member */
#define PANELS_EACH 4              /* or more, for each member, are not cut */

struct stage {
    _Alignas(64) atomic_llong taken; /* jobs, or more: each finds out once that there are no more */
    atomic_llong done;
};

struct team {
    int size;             /* members, if all come */
    struct stage *stages; /* zeros */
    /* All stages before this one are done. Who is late may set it back: then some are walked again,
       and found done. */
    atomic_int reached;
};

struct member {
    struct team *team;
    int number;       /* from 0, below the team's size */
    int stage;        /* that it enters next */
    int leaves_early; /* as the work has it */
};

/* A member's way through one stage. */
struct turn {
    struct team *team;
    struct stage *stage; /* NULL: done before it came */
    int index;
    int64_t num, at_once, from, to, finished;
};

/* Before another look at what somebody else is going to write. */
INLINE void pause_a_little(int *looks) {
    if (++*looks % LOOKS_BEFORE_YIELDING == 0) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

INLINE struct turn enter_stage(struct member *m, int64_t num, int64_t at_once) {
    struct turn t = {m->team, &m->team->stages[m->stage], m->stage, num, at_once, 0, 0, 0};
    int reached = atomic_load_explicit(&m->team->reached, memory_order_acquire);
    if (m->stage++ < reached) t.stage = NULL;
    return t;
}

/* Whether there are jobs [from, to) to do, after those it did; without, the stage is done. A member
   gets them in ascending order, on which best.h counts. */
INLINE int take_jobs(struct turn *t) {
    if (!t->stage) return 0;
    t->finished += t->to - t->from;
    t->from = atomic_fetch_add_explicit(&t->stage->taken, t->at_once, memory_order_relaxed);
    if (t->from < t->num) {
        t->to = t->from + t->at_once < t->num ? t->from + t->at_once : t->num;
        return 1;
    }
    if (t->finished)
        atomic_fetch_add_explicit(&t->stage->done, t->finished, memory_order_acq_rel);
    for (int looks = 0; atomic_load_explicit(&t->stage->done, memory_order_acquire) < t->num;)
        pause_a_little(&looks);
    atomic_store_explicit(&t->team->reached, t->index + 1, memory_order_release);
    return 0;
}

/* The jobs `i` of the next stage that fall to this member; behind the loop all of them are done. */
#define FOR_JOBS(i, member, num, at_once)                                            \
    for (struct turn turn = enter_stage(member, num, at_once); take_jobs(&turn);)    \
        for (int64_t i = turn.from; i < turn.to; i++)

/* Into which jobs the columns of a weight are cut that comes from memory: `num` streams of `each`
   units of columns, long ones, since memory waits where a stream begins; then single units, by which
   all members end together. */
struct streams {
    int64_t num, each, units, unit, num_out;
};

/* A unit is a panel where there are enough: of one that two members share each fetches all of it, and
   a product of 9 panels by two took a quarter longer. */
INLINE struct streams cut_into_streams(int64_t num_out, int64_t num_bytes, int panel, int least,
                                       int size) {
    int64_t longest = num_bytes / size / STREAM_BYTES, num = size * (longest > 1 ? longest : 1);
    int64_t unit = num_out >= (int64_t)PANELS_EACH * size * panel ? panel : least;
    int64_t units = (num_out + unit - 1) / unit;
    return (struct streams){num, units ? (units - 1) / num : 0, units, unit, num_out};
}

INLINE int64_t jobs_of(const struct streams *s) { return s->num + s->units - s->num * s->each; }

/* Where a job begins, and the one before it ends. */
INLINE int64_t column_of(const struct streams *s, int64_t job) {
    int64_t unit = job < s->num ? job * s->each : s->num * s->each + job - s->num;
    return unit * s->unit < s->num_out ? unit * s->unit : s->num_out;
}
