/* A small thread pool for parallel loops. Results never depend on which worker runs a task. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "examples/gpt.h"

struct gpt_pool {
    pthread_mutex_t lock;
    pthread_cond_t start, finish;
    int threads, started; /* started: threads created, without the caller */
    pthread_t *ids;
    /* protected by the lock */
    uint64_t round;
    int active, quit, numbered;
    /* set before a round starts, constant during it */
    gpt_task_fn fn;
    void *context;
    size_t count;
    atomic_size_t next; /* the next task to hand out */
};

static void take_tasks(gpt_pool *pool, int worker) {
    for (;;) {
        size_t index = atomic_fetch_add(&pool->next, 1);
        if (index >= pool->count)
            return;
        pool->fn(pool->context, index, worker);
    }
}

static void *worker_main(void *argument) {
    gpt_pool *pool = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    int worker = ++pool->numbered;
    for (;;) {
        while (pool->round == seen && !pool->quit)
            pthread_cond_wait(&pool->start, &pool->lock);
        if (pool->quit)
            break;
        seen = pool->round;
        pthread_mutex_unlock(&pool->lock);
        take_tasks(pool, worker);
        pthread_mutex_lock(&pool->lock);
        if (--pool->active == 0)
            pthread_cond_signal(&pool->finish);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

gpt_pool *gpt_pool_new(int threads) {
    gpt_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->threads = threads < 1 ? 1 : threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->start, NULL);
    pthread_cond_init(&pool->finish, NULL);
    pool->ids = calloc((size_t)pool->threads, sizeof *pool->ids);
    while (pool->ids && pool->started < pool->threads - 1) {
        if (pthread_create(&pool->ids[pool->started], NULL, worker_main, pool) != 0)
            break;
        pool->started++;
    }
    if (!pool->ids || pool->started < pool->threads - 1) {
        gpt_pool_free(pool);
        return NULL;
    }
    return pool;
}

void gpt_pool_free(gpt_pool *pool) {
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->quit = 1;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->ids[i], NULL);
    pthread_cond_destroy(&pool->finish);
    pthread_cond_destroy(&pool->start);
    pthread_mutex_destroy(&pool->lock);
    free(pool->ids);
    free(pool);
}

int gpt_pool_threads(const gpt_pool *pool) {
    return pool->threads;
}

void gpt_pool_run(gpt_pool *pool, size_t count, gpt_task_fn fn, void *context) {
    if (pool->started == 0 || count < 2) {
        for (size_t i = 0; i < count; i++)
            fn(context, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->context = context;
    pool->count = count;
    atomic_store(&pool->next, 0);
    pool->active = pool->started;
    pool->round++;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    take_tasks(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->active > 0)
        pthread_cond_wait(&pool->finish, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
