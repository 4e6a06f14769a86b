/* Steps of tiny random decoders, of several callers at once, for ThreadSanitizer. Each is computed
   by one thread alone, and by a caller with workers, who begins, helps and ends at odd moments;
   both must leave the same bits everywhere: results, caches, and the room between.

   Arguments: a seed, the number of callers, and the steps of each. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int below(unsigned *seed, int num) { return rand_r(seed) % num; }

/* No time, a moment, or long enough for the others to come to the end, or to fall asleep. */
static void wait_a_little(unsigned *seed) {
    static const long nanoseconds[] = {0, 0, 1000, 100000, 3000000};
    struct timespec time = {0, nanoseconds[below(seed, 5)]};
    if (time.tv_nsec) nanosleep(&time, NULL);
}

/* Now and then a thread is held up behind a lock: a worker comes late to what it has joined. */
static int unlock_and_linger(pthread_mutex_t *lock) {
    static _Thread_local unsigned seed;
    int status = pthread_mutex_unlock(lock);
    if (below(&seed, 8) == 0) wait_a_little(&seed);
    return status;
}

#define pthread_mutex_unlock unlock_and_linger
#include "kernels.c"

#define MOST_CALLERS 4
#define MOST_THREADS 4
#define MOST_LAYERS 3
#define HIDDEN 64
#define HEADS 4
#define KV_HEADS 2
#define DIM 32
#define QKV ((HEADS + 2 * KV_HEADS) * DIM)
#define WIDTH 96
#define VOCAB 208
#define REQUESTS 6 /* at most, in a step */
#define BLOCK_SIZE 16
#define BLOCKS_EACH 4
#define NUM_BLOCKS (1 + REQUESTS * BLOCKS_EACH) /* the first is the beginning of whoever has one */
#define POSITIONS (BLOCK_SIZE * BLOCKS_EACH)
#define MOST_TOKENS (REQUESTS * POSITIONS)
#define CACHE (NUM_BLOCKS * KV_HEADS * BLOCK_SIZE * DIM)
#define MEMORY (2 << 20)
#define NUMBERS (1 << 16)
#define PANELS 4 /* at most, of a weight */

/* Between -1 and 1, bfloat16: every tensor is some of them. */
static uint16_t numbers[NUMBERS];

/* A decoder and a step of it, all that it reads and writes within `memory`. */
struct scene {
    struct model model;
    struct layer layers[MOST_LAYERS];
    struct step step;
    int32_t table[REQUESTS * BLOCKS_EACH], starts[REQUESTS + 1], lens[REQUESTS];
    int64_t slots[MOST_TOKENS], token_ids[MOST_TOKENS], wanted[REQUESTS];
    uint16_t *k_caches[MOST_LAYERS], *v_caches[MOST_LAYERS];
    const uint16_t *cos, *sin;
    size_t used;
    _Alignas(64) char memory[MEMORY];
};

struct caller {
    pthread_t thread;
    unsigned seed;
    int num_steps, num_faults;
    struct scene alone, together;
};

/* Some bytes of memory, filled. */
static void *take(struct scene *c, unsigned *seed, size_t num_bytes) {
    char *taken = c->memory + c->used;
    c->used += (num_bytes + 63) / 64 * 64;
    if (c->used > MEMORY) abort();
    for (size_t done = 0, some; done < num_bytes; done += some) {
        size_t from = 2 * below(seed, NUMBERS / 2);
        some = num_bytes - done < NUMBERS ? num_bytes - done : NUMBERS;
        memcpy(taken + done, (char *)numbers + from, some);
    }
    return taken;
}

static uint16_t *take_numbers(struct scene *c, unsigned *seed, size_t num) {
    return take(c, seed, num * sizeof(uint16_t));
}

/* A packed weight [num_out, num_in]; of bytes, if it gets scales. */
static const void *take_weight(struct scene *c, unsigned *seed, int num_out, int num_in,
                               const float **scales) {
    int padded = (num_out + 63) / 64 * 64;
    if (!scales) {
        omp_set_num_threads(1); /* a parallel region of more would be full of races */
        struct panel panels[PANELS + 1];
        const uint16_t *weight = numbers + below(seed, NUMBERS - num_out * num_in);
        int64_t size = cb_code_weight(weight, num_in, num_out, 0, panels);
        struct packed *packed = take(c, seed, size);
        cb_pack_weight(weight, num_in, num_out, 0, panels, packed);
        return packed;
    }
    float *own = take(c, seed, padded * sizeof *own);
    for (int i = 0; i < padded; i++) own[i] = (float)(1 + below(seed, 100)) / 1e4f;
    *scales = own;
    return take(c, seed, (size_t)padded * ((num_in + 63) / 64 * 64));
}

static void set_decoder(struct scene *c, unsigned *seed) {
    int is_int8 = HAS_INT8 && below(seed, 2), has_norms = below(seed, 2);
    c->model = (struct model){
        .embedding = take_numbers(c, seed, VOCAB * HIDDEN),
        .norm = take_numbers(c, seed, HIDDEN),
        .vocab = VOCAB,
        .num_layers = 1 + below(seed, MOST_LAYERS),
        .hidden = HIDDEN,
        .heads = HEADS,
        .kv_heads = KV_HEADS,
        .dim = DIM,
        .half = DIM / 2,
        .width = WIDTH,
        .eps = 1e-5f,
        .attention_scale = 0.05f,
        .residual_scale = 1.0f,
        .embedding_scale = 1.0f,
    };
    const float **of_head = is_int8 ? &c->model.head_scales : NULL;
    c->model.head = take_weight(c, seed, VOCAB, HIDDEN, of_head);
    for (int i = 0; i < c->model.num_layers; i++) {
        struct layer *l = &c->layers[i];
        *l = (struct layer){.turns = below(seed, 2) - 1, .window = below(seed, 2) * 20};
        l->attention_norm = take_numbers(c, seed, HIDDEN);
        l->mlp_norm = take_numbers(c, seed, HIDDEN);
        if (has_norms) l->q_norm = take_numbers(c, seed, DIM);
        if (has_norms) l->k_norm = take_numbers(c, seed, DIM);
        l->qkv = take_weight(c, seed, QKV, HIDDEN, is_int8 ? &l->qkv_scales : NULL);
        l->output = take_weight(c, seed, HIDDEN, HEADS * DIM, is_int8 ? &l->output_scales : NULL);
        l->gate_up = take_weight(c, seed, 2 * WIDTH, HIDDEN, is_int8 ? &l->gate_up_scales : NULL);
        l->down = take_weight(c, seed, HIDDEN, WIDTH, is_int8 ? &l->down_scales : NULL);
    }
}

/* Some rows: one token behind others, or up to half of what there is room for. */
static void set_rows(struct scene *c, unsigned *seed) {
    struct step *s = &c->step;
    s->rows = 1 + below(seed, REQUESTS);
    for (int row = 0; row < s->rows; row++) {
        int num = below(seed, 2) ? 1 : 1 + below(seed, POSITIONS / 2);
        int past = below(seed, POSITIONS / 2);
        for (int i = 0; i < BLOCKS_EACH; i++) {
            int is_shared = i == 0 && past >= BLOCK_SIZE;
            c->table[row * BLOCKS_EACH + i] = is_shared ? 0 : 1 + row * BLOCKS_EACH + i;
        }
        c->starts[row] = (int32_t)s->tokens;
        c->lens[row] = past + num;
        for (int at = past; at < past + num; at++, s->tokens++) {
            int block = c->table[row * BLOCKS_EACH + at / BLOCK_SIZE];
            c->slots[s->tokens] = block * BLOCK_SIZE + at % BLOCK_SIZE;
            c->token_ids[s->tokens] = below(seed, VOCAB);
        }
        if (below(seed, 4)) c->wanted[s->num_wanted++] = s->tokens - 1;
    }
    c->starts[s->rows] = (int32_t)s->tokens;
}

static void set_step(struct scene *c, unsigned *seed) {
    struct step *s = &c->step;
    *s = (struct step){
        .table_stride = BLOCKS_EACH,
        .num_blocks = NUM_BLOCKS,
        .block_size = BLOCK_SIZE,
        .block_stride = KV_HEADS * BLOCK_SIZE * DIM,
        .head_stride = BLOCK_SIZE * DIM,
        .table = c->table,
        .starts = c->starts,
        .lens = c->lens,
        .slots = c->slots,
        .token_ids = c->token_ids,
        .wanted = c->wanted,
        .k_caches = c->k_caches,
        .v_caches = c->v_caches,
        .cos = &c->cos,
        .sin = &c->sin,
    };
    set_rows(c, seed);
    c->cos = take_numbers(c, seed, POSITIONS * DIM);
    c->sin = take_numbers(c, seed, POSITIONS * DIM);
    for (int i = 0; i < c->model.num_layers; i++) {
        c->k_caches[i] = take_numbers(c, seed, CACHE);
        c->v_caches[i] = take_numbers(c, seed, CACHE);
    }
    s->x = take_numbers(c, seed, s->tokens * HIDDEN);
    s->kept = take_numbers(c, seed, s->tokens * HIDDEN);
    s->normed = take_numbers(c, seed, s->tokens * HIDDEN);
    s->qkv = take_numbers(c, seed, s->tokens * QKV);
    s->attended = take_numbers(c, seed, s->tokens * HEADS * DIM);
    s->gated = take_numbers(c, seed, s->tokens * WIDTH);
    s->rounded = take(c, seed, s->tokens * QKV / 64 * 72);
    size_t num_bytes = s->num_wanted * VOCAB * 2;
    void *answer = memset(take(c, seed, num_bytes), 0xff, num_bytes);
    if (below(seed, 2))
        s->best = answer;
    else
        s->out = answer;
}

static void set_scene(struct scene *c, unsigned seed) {
    c->used = 0;
    set_decoder(c, &seed);
    set_step(c, &seed);
}

/* Whether all that was asked for is there: `set_step` leaves what no step gives. */
static int is_answered(const struct scene *c) {
    const struct step *s = &c->step;
    for (int64_t i = 0; i < s->num_wanted; i++) {
        if (s->best && (s->best[i] < 0 || s->best[i] >= VOCAB)) return 0;
        for (int64_t j = 0; s->out && j < VOCAB; j++)
            if (s->out[i * VOCAB + j] == 0xffff) return 0;
    }
    return 1;
}

static struct run *begin(struct scene *c, int num_threads) {
    struct run *run;
    omp_set_num_threads(num_threads);
    if (cb_begin_decoder(&c->model, c->layers, &c->step, &run)) abort();
    return run;
}

static void end(struct run *run) {
    if (cb_end_decoder(run)) abort();
}

static void *call(void *of_caller) {
    struct caller *caller = of_caller;
    struct scene *alone = &caller->alone, *together = &caller->together;
    for (int i = 0; i < caller->num_steps; i++) {
        unsigned seed = (unsigned)rand_r(&caller->seed);
        set_scene(alone, seed);
        set_scene(together, seed);
        end(begin(alone, 1));
        struct run *run = begin(together, 2 + below(&seed, MOST_THREADS - 1));
        for (int helps = below(&seed, 3); helps > 0; helps--) {
            wait_a_little(&seed);
            cb_help_decoder(run);
        }
        wait_a_little(&seed);
        end(run);
        int is_alike = !memcmp(alone->memory, together->memory, alone->used);
        if (!is_alike || !is_answered(alone)) caller->num_faults++;
    }
    return NULL;
}

int main(int num_arguments, char **arguments) {
    static struct caller callers[MOST_CALLERS];
    if (num_arguments != 4) return 2;
    unsigned seed = (unsigned)atoi(arguments[1]);
    int num_callers = atoi(arguments[2]), num_steps = atoi(arguments[3]), num_faults = 0;
    for (int i = 0; i < NUMBERS; i++) {
        float number = (float)(below(&seed, 2001) - 1000) / 1000.0f;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        numbers[i] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < num_callers; i++) {
        callers[i].seed = (unsigned)rand_r(&seed), callers[i].num_steps = num_steps;
        if (pthread_create(&callers[i].thread, NULL, call, &callers[i])) abort();
    }
    for (int i = 0; i < num_callers; i++) {
        pthread_join(callers[i].thread, NULL);
        num_faults += callers[i].num_faults;
    }
    printf("%d of %d steps are wrong\n", num_faults, num_callers * num_steps);
    return num_faults > 0;
}
