/* A thread that writes one buffer while its owner fills the next one. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "cli/output/output.h"
#include "cli/files/files.h"

struct cli_writer {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards all below */
    pthread_cond_t changed;
    cli_output *output; /* where `data` goes; NULL: nothing is to be written */
    const void *data;
    size_t size;
    bool ends;
    ckd_status status; /* of the last write */
    ckd_error error;
};

static void *run(void *context) {
    cli_writer *w = context;
    pthread_mutex_lock(&w->mutex);
    while (!w->ends || w->output) {
        if (!w->output) {
            pthread_cond_wait(&w->changed, &w->mutex);
            continue;
        }
        cli_output *output = w->output;
        ckd_error error;
        pthread_mutex_unlock(&w->mutex);
        ckd_status status = cli_output_write(output, w->data, w->size, &error);
        pthread_mutex_lock(&w->mutex);
        w->status = status;
        w->error = status == CKD_OK ? w->error : error;
        w->output = NULL;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

cli_writer *cli_writer_new(void) {
    cli_writer *w = calloc(1, sizeof(*w));
    sigset_t all, before;
    if (!w) {
        return NULL;
    }
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->changed, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the owner */
    int failed = pthread_create(&w->thread, NULL, run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        pthread_mutex_destroy(&w->mutex);
        pthread_cond_destroy(&w->changed);
        free(w);
        return NULL;
    }
    return w;
}

/* Returns when nothing is being written. The caller holds the mutex. */
static ckd_status wait_for_write(cli_writer *w, ckd_error *err) {
    while (w->output) {
        pthread_cond_wait(&w->changed, &w->mutex);
    }
    ckd_status status = w->status;
    if (status != CKD_OK) {
        *err = w->error;
    }
    w->status = CKD_OK;
    return status;
}

ckd_status cli_writer_write(cli_writer *w, cli_output *output, const void *data, size_t size,
                            ckd_error *err) {
    pthread_mutex_lock(&w->mutex);
    ckd_status status = wait_for_write(w, err);
    if (status == CKD_OK) {
        w->output = output;
        w->data = data;
        w->size = size;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->mutex);
    return status;
}

ckd_status cli_writer_wait(cli_writer *w, ckd_error *err) {
    pthread_mutex_lock(&w->mutex);
    ckd_status status = wait_for_write(w, err);
    pthread_mutex_unlock(&w->mutex);
    return status;
}

void cli_writer_free(cli_writer *w) {
    if (!w) {
        return;
    }
    pthread_mutex_lock(&w->mutex);
    w->ends = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    pthread_mutex_destroy(&w->mutex);
    pthread_cond_destroy(&w->changed);
    free(w);
}
