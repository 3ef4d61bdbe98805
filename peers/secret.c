/*
 * Only nodes that have the secret may connect. Neither side sends it. Each side proves that it has it, by HMAC-SHA-256
 * over random numbers and the names of both. So an overheard proof is of no use in another connection. Later messages
 * are not encrypted. libcrypto computes the HMAC. It is opened when it is needed.
 */
#include "peers/internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

ckd_status peer_secret_read(peer_secret *out, const char *path, ckd_error *err) {
    struct stat about;
    bytes text = {.size = 0};
    *out = (peer_secret){.size = 0};
    if (stat(path, &about) != 0) {
        return err_sys(err, errno, path, "cannot read the secret of the agents");
    }
    if ((about.st_mode & 077) != 0 || about.st_uid != geteuid()) {
        return err_set(err, CKD_E_READ_ONLY,
                       "others may read the secret in %s: it must be this user's, with mode 0600 (chmod 600)",
                       path);
    }
    ckd_status status = file_read_all(&text, path, PEER_SECRET_MAX + 2, err);
    while (status == CKD_OK && text.size > 0 &&
           (text.data[text.size - 1] == '\n' || text.data[text.size - 1] == '\r')) {
        text.size--;
    }
    if (status == CKD_OK && (text.size < PEER_SECRET_MIN || text.size > PEER_SECRET_MAX)) {
        status = err_set(err, CKD_E_INVALID, "the secret in %s has %zu bytes: it must have %d to %d", path,
                         text.size, PEER_SECRET_MIN, PEER_SECRET_MAX);
    }
    if (status == CKD_OK) {
        memcpy(out->data, text.data, text.size);
        out->size = text.size;
    }
    bytes_free(&text);
    return status;
}

/* ---- libcrypto ---- */

/* These two are the same in OpenSSL 1.1 and 3. */
static struct {
    const void *(*sha256)(void);
    unsigned char *(*hmac)(const void *digest, const void *key, int key_size, const unsigned char *data,
                           size_t size, unsigned char *out, unsigned *out_size);
} crypto;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool found;

static void find_crypto(void) {
    void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    library = library ? library : dlopen("libcrypto.so.1.1", RTLD_NOW | RTLD_LOCAL);
    if (library) {
        *(void **)(void *)&crypto.sha256 = dlsym(library, "EVP_sha256");
        *(void **)(void *)&crypto.hmac = dlsym(library, "HMAC");
        found = crypto.sha256 && crypto.hmac;
    }
}

ckd_status secret_usable(ckd_error *err) {
    (void)pthread_once(&once, find_crypto);
    return found ? CKD_OK
                 : err_set(
                       err, CKD_E_UNSUPPORTED,
                       "agents of several nodes need libcrypto of OpenSSL 3 or 1.1, but there is none here: "
                       "install it (Debian: libssl3)");
}

/* ---- proofs ---- */

ckd_status secret_prove(uint8_t out[SECRET_PROOF], const peer_secret *secret, const greeting *g,
                        greeting_side side, ckd_error *err) {
    bytes about = {.size = 0};
    bytes_put_string(&about, side == CONNECTS ? "ckptdelta agent: connects" : "ckptdelta agent: listens");
    for (int i = 0; i < 2; i++) {
        bytes_put_string(&about, g->names[i]);
        bytes_put(&about, g->nonces[i], SECRET_NONCE);
    }
    unsigned size = SECRET_PROOF;
    bool made = !about.failed && crypto.hmac(crypto.sha256(), secret->data, (int)secret->size, about.data,
                                             about.size, out, &size) != NULL;
    ckd_status status = made ? CKD_OK : err_nomem(err, about.size, "a proof of the agents' secret");
    bytes_free(&about);
    return status;
}

ckd_status secret_check(const uint8_t proof[SECRET_PROOF], const peer_secret *secret, const greeting *g,
                        greeting_side side, ckd_error *err) {
    uint8_t expected[SECRET_PROOF];
    ckd_status status = secret_prove(expected, secret, g, side, err);
    if (status != CKD_OK) {
        return status;
    }
    unsigned different = 0;
    for (size_t i = 0; i < SECRET_PROOF; i++) { /* takes the same time wherever the two differ */
        different |= (unsigned)(expected[i] ^ proof[i]);
    }
    return different ? err_set(err, CKD_E_READ_ONLY,
                               "its secret or its list of nodes is another one: all agents need the same")
                     : CKD_OK;
}
