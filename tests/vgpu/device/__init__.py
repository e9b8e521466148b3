"""The virtual GPU node: asynchronous queues on a timeline of their own, and what NVML sees of it.

    with virtual_gpus(tmp_path, gpus=2) as node:
        subprocess.run([...], env={**os.environ, **node.env})
        truth = node.truth()

Inside the subprocess `vgpu.client` enqueues work; any reader of NVML sees it live.
"""
