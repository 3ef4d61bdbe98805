#include "tests/support/emulated_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void catch_up(void);
static device_result take_off(const device_queue *queue, const char *name, device_failure *why);
static void landed(void);
#define EMULATED_LAUNCH(queue, name, why) take_off(queue, name, why)
#define EMULATED_LANDED()                 landed()
#include "kernels/cuda/operations.h"

int emulated_devices = 1;
bool emulated_backwards;
int emulated_fail_after;
device_result emulated_fail_as = DEVICE_FAILED;
bool emulated_without_bytes;
uint64_t emulated_byte_products;
uint64_t emulated_memory, emulated_pinned, emulated_marks, emulated_copied[3], emulated_largest,
    emulated_largest_memory;

static pthread_mutex_t call_mutex = PTHREAD_MUTEX_INITIALIZER;
static emulated_calls called; /* guarded by call_mutex */

emulated_calls emulated_called(void) {
    pthread_mutex_lock(&call_mutex);
    emulated_calls so_far = called;
    pthread_mutex_unlock(&call_mutex);
    return so_far;
}

static void note_call(uint64_t *counter) {
    pthread_mutex_lock(&call_mutex);
    ++*counter;
    pthread_mutex_unlock(&call_mutex);
}

static device_result call(const char *name, int device, device_failure *why) {
    pthread_mutex_lock(&call_mutex);
    bool fails = emulated_fail_after > 0 && --emulated_fail_after == 0;
    pthread_mutex_unlock(&call_mutex);
    if (!fails && device >= 0 && device < emulated_devices) {
        return DEVICE_DONE;
    }
    why->result = fails ? emulated_fail_as : DEVICE_ABSENT;
    snprintf(why->call, sizeof(why->call), "%s", name);
    snprintf(why->reason, sizeof(why->reason), "%s", fails ? "told to fail" : "there is no such device");
    return why->result;
}

static device_result count(int *devices, device_failure *why) {
    (void)why;
    *devices = emulated_devices;
    return DEVICE_DONE;
}

static device_result describe(device_info *about, int device, device_failure *why) {
    *about = (device_info){
        .name = "emulated", .memory = 1 << 30, .memory_free = 1 << 30, .processors = 1, .major = 9};
    return call("describe", device, why);
}

/* ---- memory: a head before each allocation holds its size and its device ---- */

enum { HEAD = 64 };
#define OWNED 4096
static void *owned[OWNED];
static size_t owned_end; /* behind the last entry that was ever used */

/*
 * Only kernels and copies may touch device memory. It is poisoned while none runs, so that the address
 * sanitizer reports any other access.
 */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define ASAN_FIRST_POISONED(address, size) __asan_region_is_poisoned((void *)(uintptr_t)(address), size)
#else
#define ASAN_FIRST_POISONED(address, size)         ((void)(address), (void)(size), NULL)
#define ASAN_POISON_MEMORY_REGION(address, size)   ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif
static pthread_mutex_t memory_mutex = PTHREAD_MUTEX_INITIALIZER;
static int running; /* kernels and copies that run now; memory_mutex guards it, and `owned` */

static uint64_t size_of(const void *memory) {
    uint64_t bytes;
    memcpy(&bytes, (const uint8_t *)memory - HEAD, sizeof(bytes));
    return bytes;
}

static int device_of(const void *memory) {
    int device;
    memcpy(&device, (const uint8_t *)memory - HEAD + sizeof(uint64_t), sizeof(device));
    return device;
}

static void lift(void) {
    pthread_mutex_lock(&memory_mutex);
    for (size_t i = 0; i < owned_end && running == 0; i++) {
        if (owned[i]) {
            ASAN_UNPOISON_MEMORY_REGION(owned[i], size_of(owned[i]));
        }
    }
    running++;
    pthread_mutex_unlock(&memory_mutex);
}

static void lower(void) {
    pthread_mutex_lock(&memory_mutex);
    running--;
    for (size_t i = 0; i < owned_end && running == 0; i++) {
        if (owned[i]) {
            ASAN_POISON_MEMORY_REGION(owned[i], size_of(owned[i]));
        }
    }
    pthread_mutex_unlock(&memory_mutex);
}

static device_result owner(int *device, const void *address, device_failure *why) {
    *device = -1;
    pthread_mutex_lock(&memory_mutex);
    for (size_t i = 0; i < owned_end; i++) {
        const uint8_t *from = owned[i];
        uint64_t bytes = 0;
        if (from) {
            memcpy(&bytes, from - HEAD, sizeof(bytes));
            if ((const uint8_t *)address >= from && (const uint8_t *)address < from + bytes) {
                *device = device_of(from);
            }
        }
    }
    pthread_mutex_unlock(&memory_mutex);
    return call("owner", 0, why);
}

static device_result allocate(void **out, int device, size_t bytes, device_failure *why) {
    *out = NULL;
    device_result result = call("allocate", device, why);
    if (result != DEVICE_DONE) {
        return result;
    }
    bool refused = emulated_largest_memory && bytes > emulated_largest_memory;
    uint8_t *all = refused ? NULL : aligned_alloc(HEAD, (bytes + 2 * HEAD - 1) / HEAD * HEAD);
    size_t i = 0;
    pthread_mutex_lock(&memory_mutex);
    while (i < OWNED && owned[i]) {
        i++;
    }
    if (all && i < OWNED) {
        uint64_t size = bytes;
        memcpy(all, &size, sizeof(size));
        memcpy(all + sizeof(size), &device, sizeof(device));
        memset(all + HEAD, 0xa5, bytes);
        ASAN_POISON_MEMORY_REGION(all + HEAD + bytes, (HEAD - bytes % HEAD) % HEAD); /* never unpoisoned */
        owned[i] = *out = all + HEAD;
        owned_end = i < owned_end ? owned_end : i + 1;
        emulated_memory += bytes;
        if (running == 0) {
            ASAN_POISON_MEMORY_REGION(owned[i], bytes);
        }
    }
    pthread_mutex_unlock(&memory_mutex);
    if (*out) {
        return DEVICE_DONE;
    }
    free(all);
    snprintf(why->reason, sizeof(why->reason), "out of memory");
    return why->result = DEVICE_FULL;
}

static void release(int device, void *memory) {
    (void)device;
    catch_up();
    pthread_mutex_lock(&memory_mutex);
    for (size_t i = 0; memory && i < owned_end; i++) {
        if (owned[i] == memory) {
            ASAN_UNPOISON_MEMORY_REGION(memory, size_of(memory));
            emulated_memory -= size_of(memory);
            owned[i] = NULL;
            free((uint8_t *)memory - HEAD);
            break;
        }
    }
    pthread_mutex_unlock(&memory_mutex);
}

static device_result allocate_pinned(void **out, int device, size_t bytes, device_failure *why) {
    *out = NULL;
    device_result result = call("allocate_pinned", device, why);
    if (result == DEVICE_DONE) {
        *out = malloc(bytes);
        result = why->result = *out ? DEVICE_DONE : DEVICE_FULL;
        pthread_mutex_lock(&memory_mutex);
        emulated_pinned += *out != NULL;
        pthread_mutex_unlock(&memory_mutex);
    }
    return result;
}

static void release_pinned(int device, void *memory) {
    (void)device;
    catch_up();
    pthread_mutex_lock(&memory_mutex);
    emulated_pinned -= memory != NULL;
    pthread_mutex_unlock(&memory_mutex);
    free(memory);
}

/* ---- queues: streams, each of which remembers what it waits for in the others ---- */

enum { STREAMS = 32 };
typedef struct emulated_stream {
    bool open;
    uint64_t blocked_on_in_flight[STREAMS]; /* for each other stream: wait for its copies up to this number */
} emulated_stream;
/* streams[0] is the default stream, and stands for any stream that is not in this array */
static emulated_stream streams[STREAMS];

static size_t stream_of(const void *stream) {
    for (size_t i = 1; i < STREAMS; i++) {
        if (stream == &streams[i]) {
            return i;
        }
    }
    return 0;
}

/*
 * Copies wait until somebody needs them: those from and to host memory, and those within device memory. Code
 * that does not wait for a copy then sees or passes the wrong bytes.
 */
typedef struct waiting_copy {
    void *to;
    const void *from;
    size_t bytes, stride, to_stride, rows;
    device_direction direction;
    size_t stream;
    uint64_t number;
    uint64_t blocked_on_in_flight[STREAMS]; /* what its stream waited for when the copy was queued */
    bool needed;
} waiting_copy;
static waiting_copy waiting[1024]; /* in the order of their numbers */
static size_t waiting_count;
static uint64_t waiting_numbers;
static pthread_mutex_t waiting_mutex = PTHREAD_MUTEX_INITIALIZER;

static void copy_now(const waiting_copy *c) {
    for (size_t i = 0; i < c->rows && c->bytes; i++) {
        memcpy((uint8_t *)c->to + i * c->to_stride, (const uint8_t *)c->from + i * c->stride, c->bytes);
    }
    emulated_copied[c->direction] += c->rows * c->bytes;
    if (c->direction == DEVICE_TO_HOST && c->rows * c->bytes > emulated_largest) {
        emulated_largest = c->rows * c->bytes;
    }
}

/* Marks the copies that must precede copy i. Call with the mutex held. */
static void need_those_before(size_t i) {
    const waiting_copy *c = &waiting[i];
    for (size_t j = 0; j < i; j++) {
        waiting[j].needed |=
            waiting[j].stream == c->stream || waiting[j].number <= c->blocked_on_in_flight[waiting[j].stream];
    }
}

/*
 * Runs the copies of a stream up to a number, and all copies that must precede these. UINT64_MAX: all copies
 * of the stream, and those of other streams that it waits for. Returns whether it called lift(): then the
 * caller calls lower(). Poisoning is slow, so it is not done where nothing is copied.
 */
static bool start_up_to(size_t stream, uint64_t number) {
    bool lifted = false;
    pthread_mutex_lock(&waiting_mutex);
    for (size_t i = waiting_count; i-- > 0;) {
        waiting_copy *c = &waiting[i];
        c->needed |= c->stream == stream ? c->number <= number
                                         : number == UINT64_MAX &&
                                               c->number <= streams[stream].blocked_on_in_flight[c->stream];
        if (c->needed) {
            need_those_before(i);
        }
    }
    size_t kept = 0;
    for (size_t i = 0; i < waiting_count; i++) {
        if (waiting[i].needed) {
            if (!lifted && waiting[i].rows * waiting[i].bytes > 0) {
                lift();
                lifted = true;
            }
            copy_now(&waiting[i]);
        } else {
            waiting[kept++] = waiting[i];
        }
    }
    waiting_count = kept;
    pthread_mutex_unlock(&waiting_mutex);
    return lifted;
}

static void run_up_to(size_t stream, uint64_t number) {
    if (start_up_to(stream, number)) {
        lower();
    }
}

/* Runs the copies of all streams. */
static void catch_up(void) {
    for (size_t i = 0; i < STREAMS; i++) {
        run_up_to(i, UINT64_MAX);
    }
}

static device_result queue_open(device_queue *out, int device, bool background, device_failure *why) {
    (void)background;
    *out = (device_queue){.device = device};
    device_result result = call("queue_open", device, why);
    pthread_mutex_lock(&waiting_mutex);
    for (size_t i = 1; i < STREAMS && result == DEVICE_DONE && !out->stream; i++) {
        if (!streams[i].open) {
            streams[i] = (emulated_stream){.open = true};
            out->stream = out->products = &streams[i];
        }
    }
    pthread_mutex_unlock(&waiting_mutex);
    return result;
}

static void queue_close(const device_queue *queue) {
    catch_up();
    pthread_mutex_lock(&waiting_mutex);
    streams[stream_of(queue->stream)].open = false;
    pthread_mutex_unlock(&waiting_mutex);
}

/* Queues a copy. Returns its number. */
static uint64_t put_off(size_t stream, waiting_copy c) {
    pthread_mutex_lock(&waiting_mutex);
    while (waiting_count == sizeof(waiting) / sizeof(waiting[0])) {
        pthread_mutex_unlock(&waiting_mutex);
        catch_up();
        pthread_mutex_lock(&waiting_mutex);
    }
    c.stream = stream;
    c.number = ++waiting_numbers;
    memcpy(c.blocked_on_in_flight, streams[stream].blocked_on_in_flight, sizeof(c.blocked_on_in_flight));
    waiting[waiting_count++] = c;
    pthread_mutex_unlock(&waiting_mutex);
    return c.number;
}

/*
 * Returns the number of an empty copy at the end of the stream. It runs when everything before it, and
 * everything that the stream waits for, has run.
 */
static uint64_t moment_of(size_t stream) {
    return put_off(stream, (waiting_copy){.direction = DEVICE_ON_DEVICE});
}

static void let_wait(const void *later, size_t earlier, uint64_t number) {
    pthread_mutex_lock(&waiting_mutex);
    uint64_t *blocked_on_in_flight = &streams[stream_of(later)].blocked_on_in_flight[earlier];
    *blocked_on_in_flight = number > *blocked_on_in_flight ? number : *blocked_on_in_flight;
    pthread_mutex_unlock(&waiting_mutex);
}

static device_result behind(const device_queue *queue, void *stream, device_failure *why) {
    let_wait(queue->stream, stream_of(stream), moment_of(stream_of(stream)));
    return call("queue_after_stream", queue->device, why);
}

static device_result before(const device_queue *queue, void *stream, device_failure *why) {
    let_wait(stream, stream_of(queue->stream), moment_of(stream_of(queue->stream)));
    return call("stream_after_queue", queue->device, why);
}

static device_result take_off(const device_queue *queue, const char *name, device_failure *why) {
    note_call(&called.launches);
    bool lifted = start_up_to(stream_of(queue->stream), UINT64_MAX);
    device_result result = call(name, queue->device, why);
    if (result == DEVICE_DONE && !lifted) {
        lift();
    } else if (result != DEVICE_DONE && lifted) {
        lower();
    }
    return result;
}

static void landed(void) {
    lower();
}

/* A failure is that of work on the queue: its copies are not made. */
static void drop_copies(size_t stream) {
    pthread_mutex_lock(&waiting_mutex);
    for (size_t i = 0; i < waiting_count; i++) {
        waiting[i].bytes = waiting[i].stream == stream ? 0 : waiting[i].bytes;
    }
    pthread_mutex_unlock(&waiting_mutex);
}

static device_result finish(const device_queue *queue, device_failure *why) {
    note_call(&called.waits);
    device_result result = call("finish", queue->device, why);
    if (result != DEVICE_DONE) {
        drop_copies(stream_of(queue->stream));
    }
    run_up_to(stream_of(queue->stream), UINT64_MAX);
    return result;
}

/* ---- marks ---- */

typedef struct emulated_mark {
    size_t stream;
    uint64_t number;
} emulated_mark;

static device_result event_new(void **out, int device, device_failure *why) {
    device_result result = call("event_new", device, why);
    *out = result == DEVICE_DONE ? calloc(1, sizeof(emulated_mark)) : NULL;
    emulated_marks += *out != NULL;
    return result;
}

static void event_free(int device, void *mark) {
    (void)device;
    emulated_marks -= mark != NULL;
    free(mark);
}

static device_result event_record(void *mark, const device_queue *queue, device_failure *why) {
    size_t stream = stream_of(queue->stream);
    *(emulated_mark *)mark = (emulated_mark){stream, moment_of(stream)};
    return call("event_record", queue->device, why);
}

static device_result stream_wait_event(void *mark, int device, void *stream, device_failure *why) {
    const emulated_mark *m = mark;
    let_wait(stream, m->stream, m->number);
    return call("stream_wait_event", device, why);
}

static device_result event_wait(void *mark, int device, device_failure *why) {
    const emulated_mark *m = mark;
    note_call(&called.waits);
    run_up_to(m->stream, m->number);
    return call("event_wait", device, why);
}

/* ---- copies ---- */

static device_result copy(const device_queue *queue, void *to, const void *from, size_t bytes,
                          device_direction direction, device_failure *why) {
    device_result result = call("copy", queue->device, why);
    note_call(&called.copies[direction]);
    if (result == DEVICE_DONE) {
        put_off(
            stream_of(queue->stream),
            (waiting_copy){
                .to = to, .from = from, .bytes = bytes, .stride = bytes, .rows = 1, .direction = direction});
    }
    return result;
}

static device_result copy_rows(const device_queue *queue, const device_rows *r, device_failure *why) {
    device_result result = call("copy_rows", queue->device, why);
    note_call(&called.copies[r->direction]);
    if (result == DEVICE_DONE) {
        put_off(stream_of(queue->stream), (waiting_copy){.to = r->to,
                                                         .from = r->from,
                                                         .bytes = r->bytes,
                                                         .stride = r->stride,
                                                         .to_stride = r->to_stride ? r->to_stride : r->bytes,
                                                         .rows = r->rows,
                                                         .direction = r->direction});
    }
    return result;
}

static device_result zero(const device_queue *queue, void *memory, size_t bytes, device_failure *why) {
    device_result result = call("zero", queue->device, why);
    run_up_to(stream_of(queue->stream), UINT64_MAX);
    if (result == DEVICE_DONE && bytes) {
        lift();
        memset(memory, 0, bytes);
        lower();
    }
    return result;
}

/* ---- products ---- */

/* Columns whose sums fit in registers. */
enum { ABREAST = 16 };

/*
 * Computes the sums of some columns in one row of a product. `left` has `rank` numbers, `stride` apart. The
 * sanitizers do not check each number: product() has checked the operands.
 */
__attribute__((no_sanitize("address"), no_sanitize("undefined"))) static void some_sums(
    float *restrict sums, const float *restrict left, uint64_t stride, const float *restrict right,
    const device_product *p, uint64_t columns) {
    float sum[ABREAST] = {0};
    if (columns == ABREAST) {
        for (uint64_t k = 0; k < p->rank; k++) {
            for (unsigned j = 0; j < ABREAST; j++) {
                sum[j] += left[k * stride] * right[k * p->columns + j];
            }
        }
    } else {
        for (uint64_t k = 0; k < p->rank; k++) {
            for (uint64_t j = 0; j < columns; j++) {
                sum[j] += left[k * stride] * right[k * p->columns + j];
            }
        }
    }
    memcpy(sums, sum, columns * sizeof(*sums));
}

/* The right factor, transposed back to row-major order; malloc'ed. */
static float *right_upright(const device_product *p) {
    float *right = malloc((p->rank * p->columns + 1) * sizeof(*right));
    if (right == NULL) {
        abort();
    }
    for (uint64_t j = 0; j < p->columns; j++) {
        for (uint64_t k = 0; k < p->rank; k++) {
            right[k * p->columns + j] = p->right[j * p->rank + k];
        }
    }
    return right;
}

/* Ends the program with the address sanitizer's report if a number is not the device's. */
static void check_operand(const float *numbers, uint64_t count) {
    const void *bad = ASAN_FIRST_POISONED(numbers, count * sizeof(*numbers));
    if (bad) {
        (void)*(const volatile uint8_t *)bad;
        abort();
    }
}

/* Each sum adds its terms in the order of k, whatever the order of the loops. */
static device_result product(const device_queue *queue, const device_product *p, device_failure *why) {
    if (take_off(queue, "product", why) != DEVICE_DONE) {
        return why->result;
    }
    check_operand(p->left, p->rows * p->rank);
    check_operand(p->right, p->rank * p->columns);
    check_operand(p->sums, p->rows * p->columns);
    float *upright = p->right_transposed ? right_upright(p) : NULL;
    const float *right = upright ? upright : p->right;
    for (uint64_t i = 0; i < p->rows; i++) {
        const float *left = p->left + (p->left_transposed ? i : i * p->rank);
        for (uint64_t j = 0; j < p->columns; j += ABREAST) {
            uint64_t more = p->columns - j;
            some_sums(p->sums + i * p->columns + j, left, p->left_transposed ? p->rows : 1, right + j, p,
                      more < ABREAST ? more : ABREAST);
        }
    }
    free(upright);
    landed();
    return DEVICE_DONE;
}

/* The alignments and sizes that cuBLAS requires. */
static bool bytes_fit(const device_byte_product *p) {
    uintptr_t addresses = (uintptr_t)p->left | (uintptr_t)p->right | (uintptr_t)p->sums;
    return addresses % 16 == 0 && p->rank == device_bytes_rank((uint32_t)p->rank) &&
           device_multiplies_bytes(p->columns);
}

static device_result byte_product(const device_queue *queue, bool *known, const device_byte_product *p,
                                  device_failure *why) {
    *known = !emulated_without_bytes;
    if (!*known) {
        return DEVICE_DONE;
    }
    if (!bytes_fit(p)) {
        snprintf(why->call, sizeof(why->call), "byte_product");
        snprintf(why->reason, sizeof(why->reason), "operands are not as they have to lie");
        return why->result = DEVICE_FAILED;
    }
    if (take_off(queue, "byte_product", why) != DEVICE_DONE) {
        return why->result;
    }
    for (uint64_t i = 0; i < p->rows; i++) {
        for (uint64_t j = 0; j < p->columns; j++) {
            int32_t sum = 0;
            for (uint64_t k = 0; k < p->rank; k++) {
                sum += p->left[i * p->rank + k] * p->right[j * p->rank + k];
            }
            p->sums[i * p->columns + j] = sum;
        }
    }
    emulated_byte_products++;
    landed();
    return DEVICE_DONE;
}

const device_backend *emulated_device(void) {
    static const device_backend backend = {.version = DEVICE_VERSION,
                                           .name = "emulated",
                                           .count = count,
                                           .describe = describe,
                                           .owner = owner,
                                           .allocate = allocate,
                                           .release = release,
                                           .allocate_pinned = allocate_pinned,
                                           .release_pinned = release_pinned,
                                           .queue_open = queue_open,
                                           .queue_close = queue_close,
                                           .queue_after_stream = behind,
                                           .stream_after_queue = before,
                                           .finish = finish,
                                           .event_new = event_new,
                                           .event_free = event_free,
                                           .event_record = event_record,
                                           .stream_wait_event = stream_wait_event,
                                           .event_wait = event_wait,
                                           .copy = copy,
                                           .copy_rows = copy_rows,
                                           .zero = zero,
                                           .elements = run_elements,
                                           .hash = run_hash,
                                           .quantise = run_quantise,
                                           .move = run_move,
                                           .quantise_levels = run_quantise_levels,
                                           .move_levels = run_move_levels,
                                           .keep = run_keep,
                                           .scatter = run_scatter,
                                           .residuals = run_residuals,
                                           .gather = run_gather,
                                           .pack = run_pack,
                                           .sums = run_sums,
                                           .columns = run_columns,
                                           .errors = run_errors,
                                           .halves = run_halves,
                                           .updates = run_updates,
                                           .product = product,
                                           .byte_product = byte_product,
                                           .round = run_round,
                                           .classify = run_classify,
                                           .split = run_split,
                                           .encode = run_encode,
                                           .decode = run_decode};
    return &backend;
}

/* Exported for programs that open the backend as a shared object, which CKD_CUDA names. */
EMULATED_EXPORT const device_backend *ckd_device_backend(void);
const device_backend *ckd_device_backend(void) {
    return emulated_device();
}
