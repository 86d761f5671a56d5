"""Code that runs inside SGLang's processes: weight loaders, a platform without CUDA, patches."""
